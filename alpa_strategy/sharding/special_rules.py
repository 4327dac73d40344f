"""Rules of ops whose sharding depends on more than index letters: losses, BatchNorm, factories."""

from __future__ import annotations

from dataclasses import replace

from alpa_strategy.ir.op import AxisStrategy, InnerCollective, OpCall, Slot, bind
from alpa_strategy.ir.placement import INVARIANT, DualPlacement, shard
from alpa_strategy.sharding.notation import read
from alpa_strategy.sharding.rule_families import EACH, FIRST, aligned, along
from alpa_strategy.sharding.splits import SUM, WHOLE, Found, Split, split_from_dims


def cross_entropy(call: OpCall) -> Found:
    """Rows are summed; the class dim is cut with three all-reduces of a float per row (max, sum of exp, target)."""
    bound = bind(call)
    logits, target = bound["logits"].index, bound["target"].index
    shape = call.operands[logits].shape
    probabilities = call.operands[target].dtype.is_floating_point
    splits: tuple[Split | None, ...] = ()
    if len(shape) > 1:
        splits = read(f"[n, c!, *d], {'[n, c!, *d]' if probabilities else '[n, *d]'}, [c!]? -> []", call) or ()
    weight = bound["weight"]
    if not probabilities and not (weight is not None and call.operands[weight.index].requires_grad):
        class_dim = 0 if len(shape) == 1 else 1
        num_rows = call.operands[logits].num_elements // shape[class_dim]
        collective = InnerCollective("all_reduce", 4 * num_rows, "forward")  # [rows] in fp32
        how = {"implementation": "vocab_cross_entropy", "collectives": (collective,) * 3}
        splits += (split_from_dims(call, [(logits, class_dim)], [WHOLE], **how),)
    return Found(splits)


def batch_norm_train(call: OpCall) -> Found:
    """Channels are independent; rows share their statistics: sums and counts are reduced, forward and backward."""
    names = ("x", "weight", "bias", "running_mean", "running_var")
    present = {name: bind(call)[name].index for name in names if isinstance(bind(call)[name], Slot)}
    if len(call.operands[present["x"]].shape) < 2:
        return Found()
    num_channels = call.operands[present["x"]].shape[1]
    statistics = [0] * (len(call.results) - 1)  # x [rows, channels, *s], statistics [channels]
    channels = split_from_dims(call, [(i, 1 if name == "x" else 0) for name, i in present.items()], [1, *statistics])
    collectives = (
        InnerCollective("all_reduce", 4 * (2 * num_channels + 1), "forward"),
        InnerCollective("all_reduce", 4 * 2 * num_channels, "backward"),
    )
    how = {"implementation": "batch_norm_sync", "collectives": collectives}
    rows = split_from_dims(call, [(present["x"], 0)], [0, *[WHOLE for _ in statistics]], **how)
    return Found((channels, rows))


def fourier(call: OpCall) -> Found:
    """fft and its relatives: linear, and the dims that are not transformed are independent."""
    dims, sizes = bind(call)["dim"], bind(call).get("s")
    if dims is None and sizes is not None:
        dims = tuple(range(-len(sizes), 0))
    return replace(along(call, dims, FIRST), origin="notation")


def factory(call: OpCall) -> Found:
    """full, zeros, ones, empty: any dim of the result may be made in shards."""
    return Found(extra=tuple(AxisStrategy((), (shard(d),)) for d in range(len(call.results[0].shape))))


def constant(call: OpCall) -> Found:
    """arange and the like: made whole on every device (a shard of it is a slice, which costs nothing)."""
    return Found()


def new_factory(call: OpCall) -> Found:
    """new_zeros and the like read only the operand's dtype: every layout of it will do."""
    layouts = [shard(d) for d in range(len(call.operands[0].shape))]
    made: list[DualPlacement] = [INVARIANT, *(shard(d) for d in range(len(call.results[0].shape)))]
    pairs = [AxisStrategy((INVARIANT,), (m,)) for m in made[1:]]
    pairs += [AxisStrategy((p,), (m,)) for p in layouts for m in made if m is INVARIANT or m is p]
    return Found(extra=tuple(pairs))


def renorm(call: OpCall) -> Found:
    """renorm: each slice along `dim` is scaled by itself."""
    rank = len(call.results[0].shape)
    return aligned(call, whole=tuple(d for d in range(rank) if d != bind(call)["dim"] % rank))


def histogram(call: OpCall) -> Found:
    """histogram with given bins: counts add up unless they are divided by their sum."""
    bound = bind(call)
    values = bound["self"].index
    weight = [bound["weight"].index] if isinstance(bound["weight"], Slot) else []
    dims = range(0 if bound["density"] else len(call.operands[values].shape))
    return Found([split_from_dims(call, [(i, d) for i in (values, *weight)], [SUM, WHOLE]) for d in dims])


def cross(call: OpCall) -> Found:
    """cross: along `dim`, or along the first dim of size 3."""
    dim = bind(call)["dim"]
    return along(call, call.results[0].shape.index(3) if dim is None else dim, linear=EACH)
