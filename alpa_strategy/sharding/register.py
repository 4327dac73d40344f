"""Sharding rules of users' ops: `register_sharding` adds rules, `prove_sharding` tests them.

They are for ops of `torch.library` and for `autograd.Function`s. Without rules these run in full on
every device.
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

_NOTATION = (
    "one [bracket] per tensor argument, then '->' and one per result: see"
    " alpa_strategy.register_sharding"
)


def register_sharding(op: str | type[torch.autograd.Function], *rules: str) -> None:
    """Register how the work of an op may be divided over devices, in index notation.

    Call it where the op is defined, in every process.

        register_sharding("mylib::linear", "[*b, k], [n, k], +[n]? -> [*b, n]")

    One bracket per tensor argument of the op's schema, in order, then one per result. Letters name
    dims:

    - An index that the result has (`n`, each of `*b`) is parallel. Devices may each compute a chunk
      of it: tensors that have the index are sharded there, the others are needed in full.
    - An index that no result has (`k`) is contracted. Each device computes a partial value of the
      result from its shards. Partial values are summed when a consumer needs the result.
    - `*b` stands for any number of dims, also none, broadcast and aligned to the right.
    - `k!`: never sharded, for dims along which elements depend on each other without being summed
      (softmax, sort).
    - `h=`: sharded into equal chunks only, for dims whose size may differ between the tensors
      (heads that share keys).
    - `[...]?`: the argument may be None.  `+[...]`: it is added to a contraction's result, which
      must happen once.

    Gradients follow from the rule: of a tensor that is sharded, each device has its shard of the
    gradient; of one that is needed in full, a partial value of it. So the backward must not mix
    elements that the rule calls independent either. `prove_sharding` tests that.

    Several rules may be given, for other ranks or for other splits: those that fit a call's ranks
    apply together. They take precedence over the package's rules, and replace those that were
    registered for the op before. When they change, models with the op are planned again. An op that
    draws random numbers must have the tag `torch.Tag.nondeterministic_seeded`.

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
        signature = parse(rule)
        problems = [_misfit(signature, overload) for overload in overloads]
        if not overloads:
            problems = [_bad_indices(signature)]
        # It must fit one overload.
        if all(problems):
            schema = overloads[0]._schema if overloads else op
            problem = f"the sharding rule {rule!r} does not fit {schema}: {problems[0]}"
            raise ShardingError(problem, _NOTATION)
    if isinstance(op, str):
        REGISTERED[op.replace("::", ".")] = RegisteredRule(op, tuple(rules))
    else:
        REGISTERED[op] = RegisteredRule(op.__qualname__, tuple(rules))
    forget_cached()


def registered_rules(targets: Iterable[Any]) -> str:
    """Return the registered rules of ops as text for fingerprints; empty if there are none."""
    lines: dict[str, str] = {}
    for target in set(targets):
        rule = registered_rule(target)
        if rule is not None:
            lines[target_name(target)] = "; ".join(rule.lines)
    return "\n".join(f"{name}: {rules}" for name, rules in sorted(lines.items()))


def prove_sharding(
    op: str,
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    num_devices: Sequence[int] = (2, 3),
) -> tuple[str, ...]:
    """Run an op on shards in every way that its rules allow, and compare with the full op.

    Forward and backward, in this process on the CPU, without process groups: on the example and on
    a dozen kinds of random data of the same shapes and dtypes. A few elements per dim are enough.
    Give dims different sizes, at least `num_devices`. Strategies of this package that communicate
    inside the op are left out.

    Args:
        op: as for `register_sharding`, by name; its first overload if none is named.
        example_args, example_kwargs: what the op takes; tensors that require a gradient are checked
            for theirs.
        num_devices: numbers of devices to simulate.

    Returns:
        The proved strategies. Per tensor `S<dim>`: sharded; `P`: partial values; `R`: full; `R*`:
        full, with partial gradients.

    Raises:
        ShardingError: a strategy does not give the full op's results or gradients, there is no such
            op, or it refuses the example or draws random numbers.
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
        # The first strategy repeats the work.
        for strategy in axis_strategies(call, n)[1:]:
            if strategy.implementation not in (None, "bias_on_first"):
                # It runs collectives inside; the package's tests prove these.
                continue
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
    """Return the overloads of an op named as `namespace::name` or `namespace::name.overload`.

    Raises:
        ShardingError: there is none.
    """
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
    """Return the reason why a rule cannot be one of this overload; empty if it can."""
    schema = target._schema
    if schema.is_mutable:
        return "it changes its arguments; only an op that returns new tensors can be divided"
    num_operands = len(signature.operands)
    arguments = [a for a in schema.arguments if "Tensor" in str(a.type)]
    missing = [a.name for a in arguments[num_operands:] if "Optional" not in str(a.type)]
    # A list may have any number of tensors.
    takes_list = any("List" in str(a.type) for a in arguments)
    if not takes_list and (num_operands > len(arguments) or missing):
        return f"it takes {len(arguments)} tensors, the rule has {num_operands}"
    num_results = len(signature.results)
    returns_list = any("List" in str(r.type) for r in schema.returns)
    if not returns_list and num_results != len(schema.returns):
        return f"it returns {len(schema.returns)} tensors, the rule has {num_results}"
    return _bad_indices(signature)


def _bad_indices(signature: Signature) -> str:
    """Return the reason why a rule's indices are wrong; empty if they are right."""
    known = {index.name for term in signature.operands for index in term.indices}
    for term in (*signature.operands, *signature.results):
        names = [index.name for index in term.indices]
        for index in term.indices:
            if index.implementation:
                return f"@{index.implementation}: local implementations are the package's own"
            if names.count(index.name) > 1:
                return f"{index.name} stands twice in one bracket"
            if index.name not in known and not index.unsharded:
                return (
                    f"{index.name} is in no operand, so that no device could compute a shard of it:"
                    f" write {index.name}!"
                )
    return ""
