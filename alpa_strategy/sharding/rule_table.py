"""The table of sharding rules: op -> a line of index notation, or the family that it belongs to.

Keys are `namespace.op.overload`, or `namespace.op` for all overloads. Ops that ATen tags as
pointwise need no entry. `rule_of` finds the rule of an op.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

from alpa_strategy.errors import ShardingError
from alpa_strategy.ir.op import CUSTOM_OPS, OpCall, Slot, flat_tensor_arguments, target_name
from alpa_strategy.sharding import rule_families as families
from alpa_strategy.sharding.notation import RuleMatch, parse, read
from alpa_strategy.sharding.notation_rules import NOTATION, Notation
from alpa_strategy.sharding.rule_families import EACH, FIRST

Family = Callable[[OpCall, int], "RuleMatch | None"]
Cached = TypeVar("Cached")


@dataclass(frozen=True)
class RegisteredRule:
    """A user's rule: lines of index notation. All lines that fit a call's ranks apply to it."""

    op: str
    lines: tuple[str, ...]

    def __call__(self, call: OpCall, axis_size: int) -> RuleMatch:
        """Return the splits of all lines that fit the call.

        Raises:
            ShardingError: none fits.
        """
        splits_of_lines = [read(line, call) for line in self.lines]
        fitting = [splits for splits in splits_of_lines if splits is not None]
        if not fitting:
            shapes = ", ".join(str(list(meta.shape)) for meta in call.operands)
            raise ShardingError(
                f"no sharding rule of {self.op} fits its call on {shapes}: {'; '.join(self.lines)}",
                "register a line for these ranks as well",
            )
        splits = dict.fromkeys(itertools.chain.from_iterable(fitting))
        return RuleMatch(tuple(splits), origin="registered")


# Users' rules (register.py), under keys as in the table, or under the autograd.Function.
REGISTERED: dict[str | type, RegisteredRule] = {}
# Caches of results that depend on the rules.
_CACHES: list[Any] = []


def depends_on_rules(cached: Cached) -> Cached:
    """Decorate an `lru_cache` whose entries are invalid when a rule is registered."""
    _CACHES.append(cached)
    return cached


def forget_cached() -> None:
    """Empty every cache that depends on the rules."""
    for cached in _CACHES:
        cached.cache_clear()


# autograd.Functions of libraries that may not be installed. In a scaled float8 matmul each shard
# has a scale of its own, as under DDP and FSDP, so results differ by float8's rounding.
LIBRARY_FUNCTIONS = {
    "torchao.float8.float8_linear.matmul_with_hp_or_float8_args": "[*b, k], [k, n] -> [*b, n]"
}


def _aten(names: str) -> list[str]:
    return [f"aten.{name}" for name in names.split()]


def _of(
    names: str, family: Callable[..., RuleMatch], *where: object, **options: object
) -> dict[str, Family]:
    """Return ATen op -> the rule `family(call, *where, **options)`, for each op in `names`."""
    return dict.fromkeys(_aten(names), lambda call, axis_size: family(call, *where, **options))


# Sets of tensor arguments of pointwise ops that may be partial values together; the other arguments
# must be full.
POINTWISE_LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor"), ((0, 1),)),
    "aten.mul.Tensor": EACH,
    **dict.fromkeys(
        _aten("mul.Scalar div.Tensor div.Scalar neg positive resolve_conj clone contiguous"), FIRST
    ),
    **dict.fromkeys(_aten("_to_copy to detach alias lift_fresh_copy conj_physical"), FIRST),
    "aten.where.self": ((1, 2),),
}

# Pointwise ops that ATen does not tag as such, or not in every PyTorch (leaky_relu: not in 2.11).
UNTAGGED_POINTWISE = (
    *_aten("contiguous _to_copy to detach alias alias_copy lift lift_fresh lift_fresh_copy"),
    *_aten(
        "dropout native_dropout alpha_dropout bernoulli geometric exponential uniform cauchy"
        " log_normal"
    ),
    *_aten("normal_functional normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor"),
    *_aten(
        "zeros_like ones_like full_like empty_like rand_like randn_like randint_like fill"
        " masked_fill"
    ),
    *_aten(
        "hardswish hardsigmoid leaky_relu log_sigmoid relu6 selu softshrink special_ndtr"
        " special_polygamma"
    ),
    *_aten("positive negative absolute fix lerp where isclose isreal nan_to_num floor_divide"),
    *_aten(
        "subtract multiply divide true_divide rsub __and__ __or__ __xor__ __lshift__ __rshift__"
    ),
    *_aten(
        "conj resolve_conj real imag complex polar chalf arccos arccosh arcsin arcsinh arctan"
        " arctanh"
    ),
)


FAMILIES: dict[str, Family] = {
    # Views and their copies.
    **_of(" ".join(families.RESHAPES), families.view),
    **_of(
        "transpose permute t movedim swapaxes swapdims numpy_T mT mH matrix_H adjoint",
        families.permutation,
    ),
    **_of("transpose_copy permute_copy t_copy", families.permutation),
    **_of("expand expand_copy broadcast_to expand_as", families.expand),
    **_of("repeat tile", families.repeat),
    **_of("repeat_interleave.self_int", families.repeat_interleave),
    **_of("repeat_interleave.self_Tensor", families.keep_other_dims),
    **_of(
        "split split_with_sizes split_with_sizes_copy chunk unsafe_split unsafe_chunk",
        families.keep_other_dims,
    ),
    **_of("tensor_split.sections tensor_split.indices gradient", families.keep_other_dims),
    **_of("vsplit flipud", families.keep_other_dims, 0),
    **_of("hsplit fliplr", families.keep_other_dims, 1),
    **_of("dsplit", families.keep_other_dims, 2),
    **_of("flip roll", families.keep_other_dims, "dims"),
    **_of("fft_fftshift fft_ifftshift", families.keep_other_dims, "dim"),
    **_of("unfold unfold_copy", families.keep_other_dims, "dimension"),
    **_of("select.int unbind.int unbind_copy.int", families.keep_other_dims, removed=True),
    **_of(
        "diagonal diagonal_copy linalg_diagonal",
        families.keep_other_dims,
        "dim1",
        "dim2",
        removed=True,
    ),
    **_of("diag_embed", families.diag_embed),
    **_of("rot90", families.rot90),
    **dict.fromkeys(
        ("aten.slice.Tensor", "aten.narrow.default", "aten.narrow_copy"), families.slice_
    ),
    **_of("pad constant_pad_nd", families.pad),
    **_of("cat concat diff stack", families.concatenate),
    **_of("hstack column_stack", families.concatenate, 1),
    **_of("vstack", families.concatenate, 0),
    **_of("dstack", families.concatenate, 2),
    # Their elements move in ways that dims do not describe, but they are linear.
    **_of(
        "as_strided as_strided_copy as_strided_scatter block_diag _chunk_cat", families.linear_only
    ),
    **_of("diag diagflat trace", families.linear_only),
    **_of("atleast_1d.Sequence atleast_2d.Sequence atleast_3d.Sequence", families.linear_only),
    **_of("put masked_scatter", families.linear_only, (0, 2)),
    **_of("resize resize_as", families.linear_only, (0,)),
    **_of("linalg_tensorsolve", families.linear_only, (1,)),
    # Sums, other reductions and losses.
    **_of("sum", families.reduction, kind="sum"),
    **_of("mean", families.reduction, kind="mean"),
    **_of("nansum", families.reduction, kind="nansum"),
    **_of(
        "amax amin max min argmax argmin var std var_mean std_mean prod mode",
        families.reduction,
        kind="other",
    ),
    **_of(
        "any all _is_any_true _is_all_true hash_tensor nanmean aminmax kthvalue",
        families.reduction,
        kind="other",
    ),
    **_of(
        "norm linalg_vector_norm linalg_norm linalg_matrix_norm count_nonzero",
        families.reduction,
        kind="other",
    ),
    **_of(
        "median nanmedian logsumexp special_logsumexp cosine_similarity",
        families.reduction,
        kind="other",
    ),
    **_of("trapezoid trapz cumulative_trapezoid", families.trapezoid),
    **_of("pairwise_distance", families.reduction, kind="other", where=-1),
    **_of("linalg_vecdot", families.reduction, kind="sum", linear=EACH),
    **_of(
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div",
        families.elementwise_loss,
    ),
    **_of(
        "binary_cross_entropy_with_logits poisson_nll_loss soft_margin_loss",
        families.elementwise_loss,
    ),
    **_of("margin_ranking_loss hinge_embedding_loss", families.elementwise_loss),
    # Along some dims.
    **_of(
        "softmax log_softmax _softmax _log_softmax _safe_softmax _softmax_backward_data glu",
        families.along,
    ),
    **_of("cumsum cumprod logcumsumexp cummax cummin topk sort argsort", families.along),
    **_of("msort", families.along, 0),
    **_of("linalg_cross", families.along, linear=EACH),
    **_of("cross", families.cross),
    **_of("renorm", families.renorm),
    **_of("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", families.fourier),
    **_of("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2", families.fourier),
    **_of("fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn", families.fourier),
    # Histograms, and tensors made from nothing.
    **_of("histogram.bins_tensor", families.histogram),
    # Made in full on every device: a shard is a slice, which costs nothing.
    **_of(
        "arange randint randperm eye linspace logspace scalar_tensor tril_indices triu_indices",
        lambda call: RuleMatch(),
    ),
    **_of("full zeros ones empty.memory_format rand randn normal.float_float", families.factory),
    **_of("new_zeros new_ones new_empty new_full", families.factory),
    "ops.cross_entropy_sum": lambda call, axis_size: families.cross_entropy(call),
    "ops.batch_norm_train": lambda call, axis_size: families.batch_norm_train(call),
}


def _pointwise(call: OpCall, axis_size: int) -> RuleMatch:
    """Return the rule of an elementwise op; linear in which operands, which may then be partial
    values.
    """
    name = target_name(call.target)
    linear = POINTWISE_LINEAR.get(name) or POINTWISE_LINEAR.get(name.rpartition(".")[0], ())
    if name == "aten.masked_fill.Scalar" and call.args[2:3] == (0,):
        linear = ((0,),)
    match = families.aligned(call, linear=linear)
    if name in ("aten.mul.Tensor", "aten.div.Tensor"):
        scaled = tuple(chosen for chosen in match.linear if _is_scaling(call, chosen))
        match = replace(match, linear=scaled)
    return match


def _is_scaling(call: OpCall, chosen: frozenset[int]) -> bool:
    """Whether a product scales the operands `chosen` by smaller tensors.

    Only then it saves a collective that they are partial values.
    """
    result = call.results[0]
    if len(result.shape) == 0:
        return True
    others = [meta for i, meta in enumerate(call.operands) if i not in chosen]
    return all(meta.num_elements < result.num_elements for meta in others)


def added_operand(call: OpCall) -> int | None:
    """Return the index of the operand that a contraction must add only once, `+[...]` in the op's
    line; None if there is none.
    """
    rule = rule_of(call.target)
    lines = rule.lines if isinstance(rule, RegisteredRule) else ()
    if isinstance(rule, Notation):
        lines = (rule.line_for(call, 1),)
    for line in lines:
        for term, argument in zip(parse(line).operands, flat_tensor_arguments(call), strict=False):
            if term.added:
                return argument.index if isinstance(argument, Slot) else None
    return None


def library_rule(target: Any) -> RegisteredRule | None:
    """Return the rule of `LIBRARY_FUNCTIONS` for an op that stands for one of these, or None."""
    if target not in CUSTOM_OPS:
        return None
    function = CUSTOM_OPS[target].function
    name = f"{function.__module__}.{function.__qualname__}"
    if name not in LIBRARY_FUNCTIONS:
        return None
    return RegisteredRule(name, (LIBRARY_FUNCTIONS[name],))


def registered_rule(target: Any) -> RegisteredRule | None:
    """Return the registered rule of an op, or None.

    Of its overload, else of all overloads, or of its autograd.Function, for which a rule of
    `library_rule` counts as well.
    """
    if target in CUSTOM_OPS:
        return REGISTERED.get(CUSTOM_OPS[target].function) or library_rule(target)
    name = target_name(target)
    return REGISTERED.get(name) or REGISTERED.get(name.rpartition(".")[0])


@depends_on_rules
@cache
def rule_of(target: Any) -> Family | None:
    """Return the rule of an op: the registered one, else the table's or that of pointwise ops.

    None if it has none.
    """
    registered = registered_rule(target)
    if registered is not None:
        return registered
    name = target_name(target)
    if not isinstance(target, torch._ops.OpOverload):
        return TABLE.get(name)
    # max.other is tagged so, and is in the table as `max`, a reduction.
    if torch.Tag.pointwise in target.tags and name not in FAMILIES:
        return _pointwise
    return TABLE.get(name) or TABLE.get(name.rpartition(".")[0])


def is_pointwise(target: Any) -> bool:
    """Whether an op computes each element of its result from the elements at its place."""
    return rule_of(target) is _pointwise


TABLE: dict[str, Family] = {**dict.fromkeys(UNTAGGED_POINTWISE, _pointwise), **FAMILIES, **NOTATION}
