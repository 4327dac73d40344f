"""Which leaves of a batch are rows, one for each sample: as the loader's collation shows, not as sizes suggest.

`default_collate` stacks samples, so all its tensors are rows. Any other collate function is tried on its first samples
and one of them twice: what has one row more then has one row a sample, if whole numbers in it do not change with what
else is in the batch, as indices of rows do. That happens where batches are made (in the loader's worker), to samples
that were loaded anyway, and leaves its random numbers and attributes as they were.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, default_collate

from alpa_strategy.capture.non_tensor_inputs import register_batch_types, value_text
from alpa_strategy.capture.python_state import fields_kept, patched, places_of
from alpa_strategy.comm.collectives import of_all_ranks, world_size
from alpa_strategy.errors import AlpaError, NotRowsError
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.user_code import mentioned_names
from alpa_strategy.lightning.checks import is_overridden
from alpa_strategy.lightning.digests import REPLICA

Kind = Literal["rows", "same", "own"]
"""Of a tensor leaf: one row a sample; the same whatever the samples; made of this batch's samples in another way."""

MAX_LEAVES = 4096
_BATCH_SIZE = re.compile("batch(?!es)|^bsz?$", re.IGNORECASE)
_NUMBER_OF_RANKS = {"world_size", "get_world_size"}
_KINDS: tuple[Kind, ...] = ("rows", "same", "own")
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class WatchedCollate:
    """A collate function; to everyone else it is that function itself.

    Its first call in any process also finds out what the tensor leaves of the batch are; later ones, which of them were
    as many as the samples by chance.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate
        # [0]: how many tensors a batch has, + 1; then the kind of each. Workers write it, the main process reads.
        self._found = torch.zeros(1 + MAX_LEAVES, dtype=torch.int16).share_memory_()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collate":  # copying and unpickling ask before there is anything
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, samples: Any) -> Any:
        if not isinstance(samples, list) or not samples:
            return self.collate(samples)
        count = len(samples)
        known = int(self._found[0]) - 1
        probe = self._with_one_twice(samples) if known < 0 else None  # first: a collate function may change its samples
        batch = self.collate(samples)
        register_batch_types(batch)
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
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
        """Of every tensor leaf; None where that is not known."""
        count = int(self._found[0]) - 1
        return None if count < 0 else tuple(_KINDS[kind] for kind in self._found[1 : 1 + count].tolist())

    def _with_one_twice(self, samples: list[Any]) -> tuple[Any, Any] | None:
        """Two batches of the same samples, which differ where random numbers are drawn."""
        try:
            with isolate_rng(include_cuda=False), fields_kept(getattr(self.collate, "__self__", self.collate)):
                # Two copies: within one, a sample that is there twice would be copied once.
                first, second = ([copy.deepcopy(samples[0]), *copy.deepcopy(samples)] for _ in range(2))
                return self.collate(first), self.collate(second)
        except Exception:  # what it says of its own samples is for the real call to raise; here nothing is known
            return None


def _kinds_in(batch: Any, probe: Any, again: Any, count: int) -> list[Kind]:
    """Of every tensor leaf of `batch`, made of `count` samples; probe, again: the same with the first sample twice."""
    register_batch_types(probe)
    leaves, more, repeated = (_tensors_in(each) for each in (batch, probe, again))
    found: dict[Any, Kind] = {
        path: _kind(leaf, more[path], count) if path in more else "own" for path, leaf in leaves.items()
    }
    rows = [path for path, kind in found.items() if kind == "rows" and leaves[path].layout is torch.strided]
    rows = [path for path in rows if torch.equal(more[path], repeated[path])]  # others are drawn at random
    if not _joint_rows(leaves, rows) <= _joint_rows(more, rows):
        found |= {p: "own" for p in rows if _counts(leaves[p]) and not torch.equal(more[p][1:], leaves[p])}
    return list(found.values())


def _tensors_in(batch: Any) -> dict[Any, Tensor]:
    return {path: leaf for path, leaf in pytree.tree_flatten_with_path(batch)[0] if isinstance(leaf, Tensor)}


def _joint_rows(leaves: Mapping[Any, Tensor], paths: list[Any]) -> Counter[bytes]:
    """What the leaves say of each sample, in any order."""
    samples = zip(*(leaves[path].detach().cpu() for path in paths), strict=True)
    return Counter(b"".join(row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in rows) for rows in samples)


def _counts(leaf: Tensor) -> bool:
    """Whether the values may be numbers of rows."""
    return not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)


def _kind(leaf: Tensor, more: Tensor, count: int) -> Kind:
    if leaf.shape[:1] == (count,) and more.shape == (count + 1, *leaf.shape[1:]):
        return "own" if _numbers_rows(leaf, more, count) else "rows"
    return "same" if leaf.shape == more.shape and bool((leaf == more).all()) else "own"


def _numbers_rows(leaf: Tensor, more: Tensor, count: int) -> bool:
    """Whether the values are a permutation of the rows of their own batch."""
    pairs = ((leaf, count), (more, count + 1))
    return _counts(leaf) and leaf.ndim == 1 and all(each.sort()[0].tolist() == list(range(n)) for each, n in pairs)


def watch(loader: Any) -> Any:
    """`loader`, whose collate function will find out what is rows."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:  # else it collates no samples
        collate = loader.collate_fn
        if collate is not default_collate and not isinstance(collate, WatchedCollate):
            loader.collate_fn = WatchedCollate(collate)
    return loader


def known_kinds(trainer: Any, module: Any, batch: Any) -> tuple[Kind, ...] | None:
    """Of every tensor leaf of a training batch; None where the loader does not say: it is no DataLoader that collates
    samples, or hooks around the transfer to the device may have changed the batch."""
    owners = [owner for owner in (module, getattr(trainer, "datamodule", None)) if owner is not None]
    if any(is_overridden(owner, name, DataHooks) for owner in owners for name in _TRANSFER_HOOKS):
        return None
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return None
    register_batch_types(batch)
    loaders = combined.flattened
    parts = [batch] if len(loaders) == 1 else combined._spec.flatten_up_to(batch)
    found: list[Kind] = []
    for loader, part in zip(loaders, parts, strict=True):
        tensors = [leaf for leaf in pytree.tree_leaves(part) if isinstance(leaf, Tensor)]
        collate = getattr(loader, "collate_fn", None)
        kinds: tuple[Kind, ...] | None = getattr(collate, "kinds", None)
        if collate is default_collate:
            kinds = tuple(_KINDS[0] for _ in tensors)
        if kinds is None or len(kinds) != len(tensors):
            return None
        found += kinds
    return tuple(found)


def agreed_kinds(kinds: tuple[Kind, ...] | None) -> tuple[Kind, ...] | None:
    """What all ranks say: None where one does not know, the least certain kind where they differ. Collective."""
    found = of_all_ranks(kinds)
    if any(each is None or len(each) != len(found[0] or ()) for each in found):
        return None
    return tuple(max(each, key=_KINDS.index) for each in zip(*(each or () for each in found), strict=True))


def own_leaves(kinds: tuple[Kind, ...] | None, batch: Any) -> dict[int, str]:
    """The leaves that are made of a rank's own samples: index in the batch -> name."""
    paths = [(i, path, leaf) for i, (path, leaf) in enumerate(pytree.tree_flatten_with_path(batch)[0])]
    tensors = [(index, path) for index, path, leaf in paths if isinstance(leaf, Tensor)]
    pairs = zip(tensors, kinds or (), strict=False)
    return {index: pytree.keystr(path) for (index, path), kind in pairs if kind == "own"}


@contextmanager
def naming(own: Mapping[int, str]) -> Iterator[None]:
    """NotRowsError for what the user's code raises where all ranks' rows meet leaves of one rank."""
    try:
        yield
    except AlpaError:
        raise
    except Exception as error:
        if not own:
            raise
        raise NotRowsError(f"{_of(own.values())}, and the step fails on it: {error}", REPLICA) from error


def check_own_leaves(own: Mapping[int, str], step: StepGraph) -> None:
    """NotRowsError where a step of all ranks' batches uses leaves that are made of one rank's samples."""
    used = set(step.consumers)
    names = [own[leaf.leaf] for leaf in step.batch if leaf.leaf in own and leaf.value in used]
    if names:
        raise NotRowsError(_of(names), REPLICA)


def check_batch_sizes(module: Any, step: StepGraph, batch: Any, again: Callable[[Any], StepGraph]) -> None:
    """NotRowsError where a step of all ranks' batches computes with a number that says how many rows a rank has, an
    attribute or in the batch, or with the number of ranks: with all ranks' rows in its place, or one rank, `again`,
    which captures, gives another graph."""

    def is_same(batch: Any, patches: Iterable[tuple[Any, str, Any]]) -> bool:
        with patched(patches):
            try:
                return replace(again(batch), logs=()).graph_digest == replace(step, logs=()).graph_digest
            except Exception:  # of the user's code, that was not written for so many rows
                return False

    rows = step.batch_size // world_size()
    places = places_of(module, rows, _BATCH_SIZE)
    read = {index for index, text in step.leaves if text == value_text(rows)}
    paths, spec = pytree.tree_flatten_with_path(batch)
    others = pytree.tree_unflatten([step.batch_size if i in read else leaf for i, (_, leaf) in enumerate(paths)], spec)
    if (places or read) and not is_same(others, [(*place, step.batch_size) for place in places]):
        names = sorted({name for _, name in places} | {f"the batch's leaf {pytree.keystr(paths[i][0])}" for i in read})
        raise NotRowsError(
            f"the step computes with {' or '.join(names)} = {rows}, the rows of this rank's batch, and would have the "
            f"{step.batch_size} of all ranks (a number taken from a tensor of the batch, `x.size(0)`, would be theirs)",
            REPLICA,
        )
    ranks = [(type(module.trainer), "world_size", 1), (torch.distributed, "get_world_size", lambda *_, **__: 1)]
    if _NUMBER_OF_RANKS & mentioned_names(module.training_step) and not is_same(batch, ranks):
        raise NotRowsError(f"the step computes with the number of ranks, {world_size()}, as DDP has it", REPLICA)


def _of(names: Iterable[str]) -> str:
    return (
        f"the batch's leaf {', '.join(names)} is made of this rank's samples and has no row for each of them, so that "
        "the batches of all ranks are no one batch of the step"
    )
