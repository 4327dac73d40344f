"""Sharding rules from outside: `register_sharding` gives an op rules, `prove_sharding` tries them
out.

For ops that ATen does not have (`torch.library`) and a user's `autograd.Function`s: without rules
they run whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import call_on, target_name
from alpa_strategy.sharding.notation import Signature, parse
from alpa_strategy.sharding.proof import runs_on_random_data, whole_run
from alpa_strategy.sharding.rule_table import (
    REGISTERED,
    RegisteredRule,
    forget_cached,
    registered_rule,
)
from alpa_strategy.sharding.strategies import axis_strategies

_NOTATION = "one [bracket] per tensor argument, then '->' and one per result: see alpa_strategy.register_sharding"


def register_sharding(op: str | type[torch.autograd.Function], *rules: str) -> None:
    """Say how an op may be divided over devices, in index notation. Do it where the op is defined,
    in every process.

        register_sharding("mylib::linear", "[*b, k], [n, k], +[n]? -> [*b, n]")

    One bracket per tensor argument of the op's schema, in order, then one per result. Letters name
    dims:

    - An index that the result has (`n`, each of `*b`) is parallel. Devices may each take a part of
      it: tensors that have the index are cut there, the others are needed whole.
    - An index that no result has (`k`) is contracted. Each device computes a summand of the result
      from its part, and the summands are added up when somebody needs the result.
    - `*b` stands for any number of dims, also none, broadcast and aligned to the right.
    - `k!`: never cut, for dims along which elements depend on each other without being summed
      (softmax, sort).
    - `h=`: cut only into equal chunks, for dims whose length may differ between the tensors (heads
      that share keys).
    - `[...]?`: the argument may be None.  `+[...]`: it is added to a contraction's result, which
      must happen once.

    Gradients follow by themselves: of a tensor that was cut, each device has its part of the
    gradient; of one that was needed whole, a summand of it; so the backward must not mix what the
    rule calls independent either. `prove_sharding`
    tries that. Several rules may be given, for other ranks or for other splits: those that fit a
    call's ranks hold together. They take precedence over the package's own rules and replace what
    was registered for the op before. They are part of a plan's fingerprint: a model with the op is
    planned again when they change. An op that draws random numbers must have the tag
    `torch.Tag.nondeterministic_seeded`.

    Args:
        op: `"namespace::name"`, or `"namespace::name.overload"` for one overload only, or an
            `autograd.Function`, whose brackets are for the tensors that `apply` is given and those
            that it returns.
        rules: at least one line.

    Raises:
        ShardingError: there is no such op, it changes its arguments, or a rule cannot be read or
            misfits its schema.
    """
    if not rules:
        raise ShardingError(f"register_sharding({op!r}) without a rule", _NOTATION)
    overloads = _overloads(op) if isinstance(op, str) else []
    for rule in rules:
        problems = [_misfit(parse(rule), overload) for overload in overloads] or [
            _bad_indices(parse(rule))
        ]
        if all(problems):
            what = overloads[0]._schema if overloads else op
            raise ShardingError(
                f"the sharding rule {rule!r} does not fit {what}: {problems[0]}", _NOTATION
            )
    key, name = (op.replace("::", "."), op) if isinstance(op, str) else (op, op.__qualname__)
    REGISTERED[key] = RegisteredRule(name, tuple(rules))
    forget_cached()


def registered_rules(targets: Iterable[Any]) -> str:
    """The registered rules of those ops that have one, as a text for fingerprints; empty where
    there are none.
    """
    rules = {
        target_name(target): rule
        for target in set(targets)
        if (rule := registered_rule(target)) is not None
    }
    return "\n".join(f"{name}: {'; '.join(rule.lines)}" for name, rule in sorted(rules.items()))


def prove_sharding(
    op: str,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    num_devices: Sequence[int] = (2, 3),
) -> tuple[str, ...]:
    """Run an op in shards in every way that its rules allow, and compare with the whole op, forward
    and backward.

    Runs in this process on the CPU, without process groups: on the example and on a dozen kinds of
    random data of the same shapes and dtypes. A few elements per dim are enough; give dims
    different sizes, at least `num_devices`.

    Args:
        op: as for `register_sharding`, by name; its first overload if none is named.
        example_args, example_kwargs: what the op takes; tensors that require a gradient are checked
            for theirs.
        num_devices: how many devices to play.

    Returns the proved strategies: per tensor `S<dim>` cut, `P` summands, `R` whole, `R*` whole with
    partial gradients.

    Raises:
        ShardingError: a strategy does not give the whole op's results or gradients, or the op
            refuses the example.
    """
    call, operands = call_on(_overloads(op)[0], example_args, example_kwargs or {})
    random_state = torch.get_rng_state()
    example = whole_run(call, operands, torch.Generator().manual_seed(0))
    if example is None:
        raise ShardingError(
            f"{op} does not run on the example, forward and backward", "call it so to see the error"
        )
    if (
        not torch.equal(torch.get_rng_state(), random_state)
        or torch.Tag.nondeterministic_seeded in call.target.tags
    ):
        raise ShardingError(
            f"{op} draws random numbers, so its shards cannot be compared",
            "define it with tags=[torch.Tag.nondeterministic_seeded], and prove it without dropout",
        )
    runs = [example, *runs_on_random_data(call)]
    proved: dict[str, None] = {}
    for n in num_devices:
        for strategy in axis_strategies(call, n)[1:]:  # the first repeats the work
            if strategy.implementation not in (None, "bias_on_first"):
                continue  # runs collectives inside: the package's own tests prove those
            if not all(run.equals_shards(strategy, n) for run in runs):
                raise ShardingError(
                    f"{op} as {strategy} on {n} devices does not give the whole op's result or"
                    " gradients",
                    "mark an index that the op works along with `!`, or leave it out of the result"
                    " if it is summed",
                )
            proved.setdefault(str(strategy))
    return tuple(proved)


def _overloads(op: str) -> list[torch._ops.OpOverload]:
    namespace, separator, name = op.partition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), name, None) if separator else None
    names = packet.overloads() if packet is not None else []
    if not names or (overload and overload not in names):
        raise ShardingError(
            f"there is no op {op!r}",
            "define it first (torch.library.custom_op), and name it as in 'mylib::op'",
        )
    if overload:
        names = [overload]
    return [getattr(packet, name) for name in names]


def _misfit(signature: Signature, target: torch._ops.OpOverload) -> str:
    """Why a rule cannot be one of this overload; empty if it can."""
    schema = target._schema
    if schema.is_mutable:
        return "it changes its arguments; only an op that returns new tensors can be divided"
    arguments = [a for a in schema.arguments if "Tensor" in str(a.type)]
    listed = any("List" in str(a.type) for a in arguments)  # any number of tensors
    missing = [
        a.name for a in arguments[len(signature.operands) :] if "Optional" not in str(a.type)
    ]
    if not listed and (len(signature.operands) > len(arguments) or missing):
        return f"it takes {len(arguments)} tensors, the rule has {len(signature.operands)}"
    if not any("List" in str(r.type) for r in schema.returns) and len(signature.results) != len(
        schema.returns
    ):
        return f"it returns {len(schema.returns)} tensors, the rule has {len(signature.results)}"
    return _bad_indices(signature)


def _bad_indices(signature: Signature) -> str:
    known = {index.name for term in signature.operands for index in term.indices}
    for term, index in (
        (each, i) for each in (*signature.operands, *signature.results) for i in each.indices
    ):
        names = [each.name for each in term.indices]
        if index.implementation:
            return f"@{index.implementation}: local implementations are the package's own"
        if names.count(index.name) > 1:
            return f"{index.name} stands twice in one bracket"
        if index.name not in known and not index.whole:
            return (
                f"{index.name} is in no operand, so that no device could make a part of it: write"
                f" {index.name}!"
            )
    return ""
