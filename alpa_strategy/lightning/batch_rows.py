"""Finds the leaves of a batch that have a batch dim, by trials of the loader's collation.

`default_collate` stacks samples, so all its tensors have a batch dim. Any other collate function is
tried on its first samples, each of them twice and one three times. A leaf that grows by the same
number has a batch dim, unless its integers depend on the other samples (indices of samples do).
A trial runs where batches are made (in the loader's worker), on samples that were loaded anyway,
and restores random numbers and attributes. Hooks around the transfer to the device are tried in the
same way on the first batch. Attributes that hooks store are found in their code.
"""

import copy
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from alpa_strategy.capture.non_tensor_inputs import register_batch_types, value_text
from alpa_strategy.capture.outside_state import fields_kept
from alpa_strategy.capture.python_state import patched
from alpa_strategy.comm.collectives import all_gather_object, world_size
from alpa_strategy.comm.mesh import AxisComm
from alpa_strategy.errors import AlpaError, NotRowsError, UnlikeStepsError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.user_code import is_user_code, mentioned_names, reads_parameters, stored_names
from alpa_strategy.lightning.checks import AFTER_BACKWARD, is_overridden, names_in, own_hooks
from alpa_strategy.lightning.digests import REPLICA, digest
from alpa_strategy.lightning.rank_consistency import SAME_SHAPES

Kind = Literal["rows", "same", "own"]
"""The kind of a leaf, a tensor or a number that is no item of a list.

rows: it has a batch dim; same: it does not depend on the samples; own: it depends on this batch's
samples in another way.
"""

MAX_LEAVES = 4096
_BATCH_SIZE = re.compile("batch(?!es)|^bsz?$", re.IGNORECASE)
_NUMBER_OF_RANKS = {"world_size", "get_world_size"}
_KINDS: tuple[Kind, ...] = ("rows", "same", "own")
_TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
_STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end")
# Hooks between a step and the update of its weights.
UPDATE_HOOKS = ("on_before_backward", "backward", *AFTER_BACKWARD)


class RecordedCollate:
    """A collate function; to everyone else it is that function itself.

    Its first call also finds out what the leaves of the batch are; later ones, which had as many by
    chance.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        # [0]: how many leaves a batch has, + 1; then the kind of each. Workers write it, the main
        # process reads.
        self._found = torch.zeros(1 + MAX_LEAVES, dtype=torch.int16).share_memory_()

    def __getattr__(self, name: str) -> Any:
        # Copying and unpickling ask before there is anything.
        if name.startswith("__") or name == "collate":
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, list) or not samples:
            return self.collate(samples)
        count = len(samples)
        known = int(self._found[0]) - 1
        # First: a collate function may change its samples.
        probe = self._with_more(samples) if known < 0 else None
        batch = self.collate(samples)
        tensors = list(_tensors_in(batch).values())
        if known == len(tensors):
            for index, leaf in enumerate(tensors, start=1):
                if self._found[index] == _KINDS.index("rows") and leaf.shape[:1] != (count,):
                    self._found[index] = _KINDS.index("own")
        elif probe is not None and len(tensors) <= MAX_LEAVES:
            kinds = [_KINDS.index(kind) for kind in _kinds_in(batch, *probe, count)]
            self._found[1 : 1 + len(kinds)] = torch.tensor(kinds, dtype=torch.int16)
            self._found[0] = 1 + len(kinds)
        return batch

    @property
    def kinds(self) -> tuple[Kind, ...] | None:
        """Of every leaf; None where that is not known."""
        count = int(self._found[0]) - 1
        if count < 0:
            return None

        return tuple(_KINDS[kind] for kind in self._found[1 : 1 + count].tolist())

    def _with_more(self, samples: list[Any]) -> tuple[Any, Any] | None:
        """Two batches of the same samples, more than once, which differ where random numbers are
        drawn.
        """
        order = _more_rows(len(samples))
        try:
            collate: Any = self.collate
            owner = getattr(collate, "__self__", collate)
            with isolate_rng(include_cuda=False), fields_kept(owner, collate, collate.__call__):
                first, second = ([copy.deepcopy(samples[i]) for i in order] for _ in range(2))
                return self.collate(first), self.collate(second)
        # What it says of its own samples is for the real call to raise; here nothing is known.
        except Exception:
            return None


def _more_rows(count: int) -> list[int]:
    """Of which samples a trial's batch is made: of all of them twice, and of the first once more,
    in front.
    """
    return [0, *range(count), *range(count)]


def _kinds_in(batch: Any, probe: Any, again: Any, count: int) -> list[Kind]:
    """Of every leaf of `batch`, made of `count` samples; probe, again: of `_more_rows` of them."""
    leaves, more, repeated = (_tensors_in(each) for each in (batch, probe, again))
    found: dict[Any, Kind] = {}
    for path, leaf in leaves.items():
        found[path] = _kind(leaf, more[path], count) if path in more else "own"
    rows = [
        path
        for path, kind in found.items()
        if kind == "rows" and leaves[path].layout is torch.strided
    ]
    # Others are drawn at random.
    rows = [path for path in rows if torch.equal(more[path], repeated[path])]
    if not _joint_rows(leaves, rows) <= _joint_rows(more, rows):
        found |= {path: "own" for path in rows if _moved(leaves[path], more[path][1 : 1 + count])}
    return list(found.values())


def _has_kind(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or type(leaf) in (int, float)


def _tensors_in(batch: Any) -> dict[Any, Tensor]:
    """The leaves by path, numbers as 0-d tensors."""
    register_batch_types(batch)
    found = pytree.tree_flatten_with_path(batch, is_leaf=_is_list)[0]
    return {path: torch.as_tensor(leaf) for path, leaf in found if _has_kind(leaf)}


def _joint_rows(leaves: Mapping[Any, Tensor], paths: list[Any]) -> Counter[bytes]:
    """What the leaves say of each sample, in any order."""
    samples = zip(*(leaves[path].detach().cpu() for path in paths), strict=True)
    return Counter(
        b"".join(row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in rows)
        for rows in samples
    )


def _counts(leaf: Tensor) -> bool:
    """Whether the values may be numbers of rows."""
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def _kind(leaf: Tensor, more: Tensor, count: int) -> Kind:
    if leaf.shape[:1] == (count,) and more.shape == (len(_more_rows(count)), *leaf.shape[1:]):
        # Values that reach up to the number of samples are indices of samples, also random ones.
        reaches = False
        if _counts(leaf) and leaf.numel() > 0:
            reaches = bool(leaf.max() < count <= more.max() < len(_more_rows(count)))
        return "own" if reaches or _shares(leaf, more) else "rows"

    is_same = leaf.shape == more.shape and bool((leaf == more).all())
    return "same" if is_same else "own"


def _moved(leaf: Tensor, now: Tensor) -> bool:
    """Whether the values are other ones; of floats not by a little: among more rows, sums are
    rounded otherwise.
    """
    if torch.equal(leaf, now) or _counts(leaf) or leaf.dtype == torch.bool:
        return not torch.equal(leaf, now)
    return not torch.allclose(
        leaf, now, rtol=0.0, atol=1e-3 * float(leaf.abs().max()), equal_nan=True
    )


def _shares(leaf: Tensor, more: Tensor) -> bool:
    """Whether the values are shares of all rows, at random or not, with the same sum however many
    rows there are.
    """
    total = (
        leaf.double().sum() if leaf.is_floating_point() and leaf.layout is torch.strided else 0.0
    )
    return bool(total) and bool(abs(more.double().sum() - total) < 1e-5 * leaf.double().abs().sum())


def watch(loader: Any) -> Any:
    """`loader`, whose collate function will find out what is rows."""
    # Else it collates no samples.
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        collate = loader.collate_fn
        if collate is not default_collate and not isinstance(collate, RecordedCollate):
            loader.collate_fn = RecordedCollate(collate)
    return loader


class BatchHooks:
    """What hooks make of a batch's rows: those around its transfer to the device, which are tried
    when they are first
    called, and those of the module and of callbacks around its step."""

    def __init__(self) -> None:
        self._watching = ExitStack()
        # Of all leaves that transfer hooks give, () if unknown; None: none.
        self.kinds: tuple[Kind, ...] | None = None
        # attributes and buffers, by the last part of their names, that a hook stores which reads
        # the batch -> the hook
        self.stored: dict[str, str] = {}
        # Transfer hooks, or there are none: what theirs set or fill could not be put back.
        self.are_tried = True

    def watch(self, module: Any) -> None:
        """Look at hooks of the module and callbacks; try those of transfers when the next training
        batch comes.
        """
        self.close()
        self.kinds = None
        self.stored = {}
        self.are_tried = True
        if world_size() == 1:
            return

        data = getattr(module.trainer, "datamodule", None)
        owners = [module] if data is None else [module, data]
        hooks = [
            (owner, n)
            for owner in owners
            for n in _TRANSFER_HOOKS
            if is_overridden(owner, n, DataHooks)
        ]
        for owner, name in (*hooks, *own_hooks(module, _STEP_HOOKS)):
            hook, is_transfer = getattr(owner, name), name in _TRANSFER_HOOKS
            if not (is_transfer or is_user_code(hook)):
                continue
            stores = stored_names(hook)
            # After self, trainer, module.
            follows_self_alone = is_transfer or owner is module
            first = 1 if follows_self_alone else 3
            self.are_tried &= not (is_transfer and stores)
            if is_user_code(hook) and reads_parameters(hook, first, -1):
                self.stored |= dict.fromkeys(stores, f"{type(owner).__name__}.{name}")
        if hooks:
            self.kinds = ()
        if hooks and self.are_tried:
            self._try_at_first(module, owners, ", ".join(dict.fromkeys(name for _, name in hooks)))

    def close(self) -> None:
        """Watch no longer."""
        self._watching.close()

    def _try_at_first(self, module: Any, owners: list[Any], names: str) -> None:
        """Try the transfer hooks `names` on a training's first batch, before it is transferred."""
        waiting, method = [True], module._on_before_batch_transfer

        @functools.wraps(method)
        def first(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if waiting and module.trainer.training:
                waiting.clear()
                # Others may have put theirs around it since.
                if module._on_before_batch_transfer is first:
                    self.close()
                try:
                    self.kinds = _tried(module, owners, names, batch)
                # What it says of the batch itself is for the real call to raise.
                except Exception as error:
                    rank_zero_info(
                        f"alpa: {names} cannot be tried on more rows: {type(error).__name__}:"
                        f" {error}"
                    )
            return method(batch, *args, **kwargs)

        self._watching.enter_context(patched([(module, "_on_before_batch_transfer", first)]))


def _rows_of(batch: Any, known: tuple[Kind, ...] | None) -> tuple[tuple[Kind, ...], int]:
    """Of every tensor leaf what it is, as known or as likely, and how many rows there are."""

    tensors = list(_tensors_in(batch).values())
    from alpa_strategy.capture.trace import likely_rows

    kinds = known or tuple("rows" if rows else "same" for rows in likely_rows(tensors))
    sizes = [len(leaf) for leaf, kind in zip(tensors, kinds, strict=True) if kind == "rows"]
    sizes += [len(each) for each in pytree.tree_leaves(batch, is_leaf=_is_list) if _is_list(each)]
    if not sizes:
        raise ValueError("the batch has no rows")
    return kinds, sizes[0]


def _tried(module: Any, owners: list[Any], names: str, batch: Any) -> tuple[Kind, ...]:
    """Of every tensor leaf that the hooks `names` give for a loader's batch, with a line where rows
    are mixed.
    """
    given, count = _rows_of(batch, _loader_kinds(module.trainer, batch))

    def made(order: Sequence[int], times: int = 1) -> Any:
        """What the hooks give for these rows when they are called the first or second time."""
        with _state_kept(owners) as changed:
            for _ in range(times):
                rows = type(module)._on_before_batch_transfer(
                    module, _with_rows(batch, given, count, order)
                )
                result = module.trainer.strategy.batch_to_device(rows)
        if changed:
            raise ValueError("they change a buffer")
        return result

    base, more, half = made(range(count)), made(_more_rows(count)), (count + 1) // 2
    found = _kinds_in(base, more, made(_more_rows(count), times=2), count)
    # It was not there with more rows.
    if "own" in given:
        found = ["own" if kind == "same" else kind for kind in found]
    other = _tensors_in(made([count - 1] * half + [*range(half, count)]))
    rows = [
        item for item, kind in zip(_tensors_in(base).items(), found, strict=True) if kind == "rows"
    ]
    mixed = [
        pytree.keystr(path)
        for path, leaf in rows
        if not torch.equal(leaf[half:], other[path][half:])
    ]
    if mixed:
        rank_zero_info(
            f"alpa: {names}: rows of the batch's leaf {', '.join(mixed)} are made of other rows too"
            " (mixup and the "
            "like): of those of the same rank, as under DDP. A captured step takes all ranks' for"
            " one batch"
        )
    return tuple(found)


def _is_list(value: Any) -> bool:
    """Whether `value` may hold an item for each sample."""
    return type(value) in (list, tuple) and all(
        isinstance(item, str | int | float) for item in value
    )


def _with_rows(batch: Any, kinds: tuple[Kind, ...], count: int, order: Sequence[int]) -> Any:
    """A copy of a loader's batch with these of its rows."""
    kind = iter(kinds)

    def taken(leaf: Any) -> Any:
        if _is_list(leaf) and len(leaf) == count:
            return type(leaf)(leaf[i] for i in order)
        return (
            leaf[list(order)] if _has_kind(leaf) and next(kind) == "rows" else copy.deepcopy(leaf)
        )

    return pytree.tree_map(taken, batch, is_leaf=_is_list)


@contextmanager
def _state_kept(owners: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Attributes, weights, buffers and generators of a module, other objects and libraries are
    afterwards as they were.

    The list that it gives then holds weights and buffers that were changed.
    """
    modules = [
        each
        for owner in owners
        for each in (owner.modules() if isinstance(owner, nn.Module) else [owner])
    ]
    kept = [
        t
        for owner in owners
        if isinstance(owner, nn.Module)
        for t in (*owner.parameters(), *owner.buffers())
    ]
    tensors = [
        (t, t.data, t.detach().clone()) for t in kept if t.layout is torch.strided and not t.is_meta
    ]
    changed: list[Tensor] = []
    try:
        with ExitStack() as stack:
            stack.enter_context(isolate_rng(include_cuda=owners[0].device.type == "cuda"))
            for each in modules:
                stack.enter_context(
                    fields_kept(each, *(getattr(each, name, None) for name in _TRANSFER_HOOKS))
                )
            yield changed
    finally:
        # A hook that fails may have changed them as well.
        for tensor, data, old in tensors:
            # By their bytes: changes through `.data` leave no trace in versions.
            if tensor.data_ptr() != data.data_ptr() or bool(digest(tensor) != digest(old)):
                tensor.data = data.copy_(old)
                changed.append(tensor)


def agreed_kinds(
    trainer: Any, batch: Any, hooks: BatchHooks, may_run_eagerly: bool, group: Any
) -> dict[Any, Kind] | None:
    """Of every leaf of a training batch that has one, by its path: the least certain kind that a
    rank says. Collective.

    None where a rank's loader, being no DataLoader that collates samples, does not say, nor do
    transfer hooks that are not tried where only a captured step will do.
    """
    paths = list(_tensors_in(batch))
    own = hooks.kinds
    if not (hooks.are_tried or may_run_eagerly):
        own = None
    elif own is None:
        own = _loader_kinds(trainer, batch)
    elif len(own) != len(paths):
        own = (_KINDS[-1],) * len(paths)
    said = all_gather_object(own, group)
    known = [each for each in said if each is not None]
    if len(known) < len(said) or len(set(map(len, known))) > 1:
        return None
    least = [max(each, key=_KINDS.index) for each in zip(*known, strict=True)]
    return dict(zip(paths, least, strict=True))


def _loader_kinds(trainer: Any, batch: Any) -> tuple[Kind, ...] | None:
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return None
    loaders = combined.flattened
    parts = [batch] if len(loaders) == 1 else combined._spec.flatten_up_to(batch)
    found: list[Kind] = []
    for loader, part in zip(loaders, parts, strict=True):
        tensors = _tensors_in(part)
        collate = getattr(loader, "collate_fn", None)
        kinds: tuple[Kind, ...] | None = getattr(collate, "kinds", None)
        if collate is default_collate:
            kinds = tuple(_KINDS[0] for _ in tensors)
        if kinds is None or len(kinds) != len(tensors):
            return None
        found += kinds
    return tuple(found)


def are_rows(kinds: Mapping[Any, Kind], batch: Any) -> tuple[bool, ...]:
    """Of every tensor of the batch, whether it has one row per sample."""
    leaves = pytree.tree_flatten_with_path(batch)[0]
    return tuple(kinds[path] == "rows" for path, leaf in leaves if isinstance(leaf, Tensor))


def own_leaves(kinds: Mapping[Any, Kind], batch: Any) -> dict[int, str]:
    """The leaves that are made of a rank's own samples: index in the batch -> name. NotRowsError
    where all are.
    """
    paths = [path for path, _ in pytree.tree_flatten_with_path(batch)[0]]
    own = {
        index: pytree.keystr(path) for index, path in enumerate(paths) if kinds.get(path) == "own"
    }
    if own and "rows" not in kinds.values():
        raise NotRowsError(_of(own.values()), REPLICA)
    return own


@contextmanager
def naming(own: Mapping[int, str], batch: Any) -> Iterator[None]:
    """NotRowsError for what the user's code raises where all ranks' rows meet tensors of one
    rank.
    """
    leaves = pytree.tree_leaves(batch)
    tensors = [name for index, name in own.items() if isinstance(leaves[index], Tensor)]
    try:
        yield
    except AlpaError:
        raise
    except Exception as error:
        if not tensors:
            raise
        raise NotRowsError(f"{_of(tensors)}, and the step fails on it: {error}", REPLICA) from error


def of_replica(trainer: Any, batch: Any, hooks: BatchHooks, axis: AxisComm, joins: bool) -> Any:
    """The batch of all ranks on `axis`: the one that all have, or (`joins`) their rows one after
    the other. Collective.
    NotRowsError or UnlikeStepsError where they have no such batch."""

    leaves, spec = pytree.tree_flatten(batch, is_leaf=_is_list)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    kinds = agreed_kinds(trainer, batch, hooks, True, axis.group) if joins else None
    if kinds is not None and (own := own_leaves(kinds, batch)):
        raise NotRowsError(_of(own.values()), REPLICA)
    from alpa_strategy.capture.trace import likely_rows

    rows = likely_rows(tensors) if kinds is None else are_rows(kinds, batch)
    count = next(
        (len(leaf) for leaf, has_rows in zip(tensors, rows, strict=True) if has_rows), None
    )
    given = iter(rows)
    flags = [
        next(given) if isinstance(x, Tensor) else _is_list(x) and len(x) == count for x in leaves
    ]
    joined = [joins and flag for flag in flags]
    lists = [x if flag and _is_list(x) else () for x, flag in zip(leaves, joined, strict=True)]

    def same(leaf: Any, is_joined: bool) -> Any:
        """What the ranks must have in common."""
        if isinstance(leaf, Tensor):
            return leaf.shape, leaf.dtype, is_joined or int(digest(leaf))
        return len(leaf) if is_joined else value_text(leaf)

    everyone = all_gather_object(
        ([same(*each) for each in zip(leaves, joined, strict=True)], lists), axis.group
    )
    if any(known != everyone[0][0] for known, _ in everyone):
        raise UnlikeStepsError(
            f"batches differ between ranks: {[known for known, _ in everyone]}", SAME_SHAPES
        )
    for index, leaf in enumerate(leaves):
        if lists[index]:
            leaves[index] = type(leaf)(item for _, others in everyone for item in others[index])
        elif joined[index]:
            leaves[index] = axis.all_gather(leaf, 0, len(leaf) * axis.size)
    return pytree.tree_unflatten(leaves, spec)


def check_own_leaves(own: Mapping[int, str], step: StepGraph) -> None:
    """NotRowsError where a step of all ranks' batches uses leaves that are made of one rank's
    samples.
    """
    used = set(step.consumers)
    read = {leaf.leaf for leaf in step.batch if leaf.value in used} | {
        index for index, _ in step.leaves
    }
    if names := [name for index, name in own.items() if index in read]:
        raise NotRowsError(_of(names), REPLICA)


def check_own_numbers(
    hooks: BatchHooks,
    module: Any,
    step: StepGraph,
    batch: Any,
    again: Callable[..., StepGraph],
    may_run_eagerly: bool,
    is_guess: bool,
) -> None:
    """NotRowsError, or a warning, where a step of all ranks' rows, or its gradients' use, needs
    what is this rank's.

    That is what a hook has made of them, by what it showed when it was tried; and, where the step
    that `again` captures with all ranks' in their place is another one: their number, an attribute
    or in the batch, a list of something (names) for each, and the number of ranks.
    """
    # Loaded with a first step, not with the import of the package.
    from alpa_strategy.microbatch.rank_samples import where_rows_meet

    used, later = set(step.consumers), names_in(own_hooks(module, UPDATE_HOOKS))
    # These, methods and classes are no numbers of rows.
    parts = dict(module.named_modules())
    owners = [
        (g, type(parts.get(g.label.rpartition(".")[0])))
        for g in step.attributes
        if g.label not in parts
    ]
    read = [
        g.label
        for g, kind in owners
        if not callable(g.namespace.get(g.name, getattr(kind, g.name, None)))
    ]
    read += [b.name for b in step.buffers if b.value in used]
    read += hooks.stored.keys() & later
    last = {name: name.rpartition(".")[2] for name in read}
    shown = ", ".join(
        f"{name} ({hooks.stored[last[name]]})" for name in last if last[name] in hooks.stored
    )
    text = f"the step reads what a hook stores that reads this rank's rows: {shown}"
    text = text if shown else _computes_with(module, step, batch, again, later)
    by_place = not (is_guess and may_run_eagerly)
    own_step = functools.partial(again, batch, world_size=1)
    if not text and (line := where_rows_meet(step, world_size(), by_place, own_step)) is not None:
        text = (
            f"rows are taken by their places in the batch ({line}), where the batch of all ranks"
            " has others"
        )
        guess = (
            "the loader yields batches, not samples: what meets here may be rows or a sequence's"
            f" steps ({line})"
        )
        text = text if by_place else guess
    if text and may_run_eagerly:
        raise NotRowsError(text, REPLICA)
    if text:
        rank_zero_warn(f"alpa: {text}. A captured step computes on the rows of all ranks")


def _computes_with(
    module: Any, step: StepGraph, batch: Any, again: Callable[[Any], StepGraph], later: Set[str]
) -> str:
    """Which of the rank's numbers and lists the step, or code with the names `later`, may compute
    with; empty: none.
    """

    from alpa_strategy.capture.python_reads import places_of

    rows = step.batch_size // world_size()
    patches: list[tuple[Any, str, Any]] = [
        (*p, step.batch_size) for p in places_of(module, rows, _BATCH_SIZE)
    ]
    if _NUMBER_OF_RANKS & mentioned_names(module.training_step):
        patches += [
            (type(module.trainer), "world_size", 1),
            (torch.distributed, "get_world_size", lambda *_, **__: 1),
        ]
    is_read = any(text == value_text(rows) for _, text in step.leaves)
    names = {name for _, name, _ in patches}
    in_hooks = later & (names | _NUMBER_OF_RANKS)

    def is_list(part: Any) -> bool:
        held = pytree.tree_leaves(part)
        return (
            type(part) in (list, tuple)
            and len(part) == rows
            and not any(isinstance(leaf, Tensor) for leaf in held)
        )

    def of_all(path: Any, part: Any) -> Any:
        is_number = is_read and type(part) is int and part == rows
        if is_number or is_list(part):
            names.add(f"the batch's {pytree.keystr(path)}")
        if is_number:
            return step.batch_size
        return part * world_size() if is_list(part) else part

    others = pytree.tree_map_with_path(of_all, batch, is_leaf=is_list)
    if not names | in_hooks:
        return ""
    if not in_hooks:
        # The user's code may not work for `n` times the samples.
        with (
            patched(patches),
            suppress(Exception),
        ):
            if replace(again(others), logs=()).graph_digest == replace(step, logs=()).graph_digest:
                return ""
    used = " or ".join(sorted(names | in_hooks))
    return (
        f"the step, or a hook with its gradients, computes with {used}, for the {rows} rows of this"
        " rank, and would "
        f"have the {step.batch_size} of all {world_size()} (a number taken from a tensor of the"
        " batch, `x.size(0)`, "
        "would be theirs)"
    )


def _of(names: Iterable[str]) -> str:
    return (
        f"the batch's leaf {', '.join(names)} is made of this rank's samples and has no row for"
        " each of them, so that "
        "the batches of all ranks are no one batch of the step"
    )
