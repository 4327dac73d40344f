"""A sharded model in the format of Hugging Face: `save_pretrained`, written by all ranks.

The library writes its configuration and decides which tensors are in which file
(`hf/lazy_state.py`). Each tensor is then made by one rank, of the parameters that it needs, which
all ranks gather: a rank has one parameter in full at a time. Files get their names when all of them
are complete.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alpa_strategy.capture.python_state import outermost
from alpa_strategy.comm.collectives import broadcast_object, on_all_ranks, rank_in, world_size
from alpa_strategy.errors import CheckpointError, RuntimeMismatchError, SetupError
from alpa_strategy.files import sync
from alpa_strategy.hf.lazy_state import FileContents, LazyState, ParameterSource
from alpa_strategy.hf.libraries import library
from alpa_strategy.hf.model_files import copy_processing_files, write_model_card
from alpa_strategy.hf.safetensors_file import Layout, create, layout_of, write_tensor
from alpa_strategy.hf.uploads import local_copy, upload
from alpa_strategy.urls import is_url, local_path

# Files of weights of at most this size, unless the user gives another.
MAX_SHARD_SIZE = "5GB"


@dataclass(frozen=True)
class Values:
    """How the values of a module's parameters are read now."""

    # Returns the full shape of a parameter.
    shape_of: Callable[[nn.Parameter], torch.Size]

    # Returns the full values of a parameter or buffer. Collective.
    read: Callable[[Tensor], Tensor]

    # Context in which parameters have their full shapes, if perhaps no memory.
    full_shapes: Callable[[], AbstractContextManager[None]]


def hugging_face_model(module: nn.Module, name: str | None = None) -> nn.Module:
    """Return the model of a LightningModule that is saved: the outermost with `save_pretrained`.

    Args:
        module: the LightningModule.
        name: of the submodule, if there are several.

    Raises:
        SetupError: there is none, or more than one and no name.
        AttributeError: there is no submodule `name`.
    """
    if name is not None:
        return module.get_submodule(name)

    def has_save_pretrained(child: nn.Module) -> bool:
        return child is not module and callable(getattr(child, "save_pretrained", None))

    models = dict(outermost(module, has_save_pretrained))
    if len(models) == 1:
        return next(iter(models.values()))

    kind = type(module).__name__
    if not models:
        raise SetupError(
            f"{kind} has no model of Hugging Face (a submodule with `save_pretrained`)",
            "save a checkpoint instead (`trainer.save_checkpoint`)",
        )
    raise SetupError(
        f"{kind} has several models of Hugging Face: {', '.join(models)}",
        f"say which one: module={next(iter(models))!r}",
    )


def save_pretrained(
    model: nn.Module,
    folder: str | Path,
    values: Values,
    max_shard_size: str | int = MAX_SHARD_SIZE,
    tokenizer: Any = None,
    upload_root: Path | None = None,
    in_background: bool = False,
) -> Path | str:
    """Write a model as its own `save_pretrained` does. Collective.

    Args:
        model: of transformers or of PEFT, sharded or not.
        folder: on a file system that all ranks share, or a URL; rank 0's is used. Other files in it
            stay, apart from weights of an earlier save.
        values: of the model's parameters.
        max_shard_size: largest size of a file of weights, as of the library.
        tokenizer: (or processor) whose files are written too; None: those of the folder or name
            from which the model was loaded are copied.
        upload_root: local folder in which files for a URL are written first, shared by all ranks;
            None: the current one.
        in_background: whether this returns before files are uploaded.

    Returns:
        The absolute folder, or its URL.

    Raises:
        CheckpointError: a file cannot be written.
        RuntimeMismatchError: the ranks have different models.
        SetupError: safetensors is not installed.
    """
    library("safetensors")
    url = broadcast_object(str(folder) if is_url(folder) else None)
    if url is not None:
        folder = local_copy(url, upload_root or Path.cwd())
    target = Path(broadcast_object(str(local_path(folder).absolute())))
    staging = target.parent / f".{target.name}.saving"
    with torch.no_grad(), torch.inference_mode(False):
        weights = _write_weights(model, staging, values, max_shard_size)

    def finish() -> None:
        if rank_in(None) != 0:
            return
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        else:
            copy_processing_files(model, staging)
        write_model_card(staging)
        _put_in_place(staging, target, weights)
        if url is not None:
            upload(target, url, in_background)

    on_all_ranks(finish, lambda _: None)
    return target if url is None else url


def _write_weights(
    model: nn.Module, staging: Path, values: Values, max_shard_size: str | int
) -> list[Path]:
    """Write configuration and weights into `staging`. Collective.

    Args:
        values: shapes and values of the model's full tensors.
        max_shard_size: of a file of weights, as of `save_pretrained`.

    Returns:
        The files of weights, relative to `staging`.

    Raises:
        CheckpointError: a file cannot be written.
        RuntimeMismatchError: the ranks have different models.
    """
    (state, files), lists = on_all_ranks(
        lambda: _planned_files(model, staging, values, max_shard_size),
        lambda planned: [(str(file.path), list(file.tensors)) for file in planned[1]],
    )
    if any(other != lists[0] for other in lists):
        raise RuntimeMismatchError(
            "the ranks would save different tensors", "build the same model on every rank"
        )

    def create_files() -> list[Layout]:
        layouts = [layout_of(file.tensors, file.metadata) for file in files]
        if rank_in(None) == 0:
            for file, layout in zip(files, layouts, strict=True):
                create(staging / file.path, layout)
        return layouts

    layouts, _ = on_all_ranks(create_files, lambda _: None)
    _write_all(state, files, layouts, staging)
    return [file.path for file in files]


def _planned_files(
    model: nn.Module, staging: Path, values: Values, max_shard_size: str | int
) -> tuple[LazyState, list[FileContents]]:
    """Let the library write its configuration into `staging`, and return the files of weights.

    Ranks other than 0 let it write into a folder of their own, which is deleted.

    Args: as of `_write_weights`.

    Returns:
        (the tensors, files with paths relative to `staging`).

    Raises:
        CheckpointError: the folder cannot be made.
    """
    rank = rank_in(None)
    folder = staging if rank == 0 else staging.with_name(f"{staging.name}.{rank}")
    try:
        _delete_folder(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error}", "give another folder") from error

    with values.full_shapes(), _saving_on_every_rank(model):
        state = LazyState(model, values.shape_of, values.read)

        def save(tensors: dict[str, Any]) -> None:
            library_model: Any = model
            library_model.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)

        files = state.collected(save)
    if rank != 0:
        _delete_folder(folder)
    relative = [
        FileContents(file.path.relative_to(folder), file.tensors, file.metadata) for file in files
    ]
    return state, relative


@contextmanager
def _saving_on_every_rank(model: nn.Module) -> Iterator[None]:
    """Context in which `save_pretrained` of the model and its submodules saves on every rank, and
    not on rank 0 alone.
    """
    models: list[Any] = [m for m in model.modules() if hasattr(m, "should_save_on_this_rank")]
    for library_model in models:
        library_model.should_save_on_this_rank = lambda _: True
    try:
        yield
    finally:
        for library_model in models:
            del library_model.should_save_on_this_rank


def _write_all(
    state: LazyState, files: Sequence[FileContents], layouts: Sequence[Layout], staging: Path
) -> None:
    """Write all tensors, buffers by rank 0, each other one by the rank that has written the fewest
    bytes so far. Collective.

    Args:
        state: the tensors.
        files: which tensors each file has, with paths relative to `staging`.
        layouts: where they are in the files, which exist.

    Raises:
        CheckpointError: a tensor cannot be written, on any rank.
    """
    rank = rank_in(None)
    num_bytes_of_rank = [0] * world_size()
    in_use: list[ParameterSource] = []
    written: set[Path] = set()
    failure: CheckpointError | None = None

    for file, layout in zip(files, layouts, strict=True):
        path = staging / file.path
        for name, tensor in file.tensors.items():
            needed = state.sources(tensor)
            _load(needed, in_use)
            in_use = needed

            # As in a checkpoint, buffers are rank 0's.
            is_of_rank = any(source.is_of_rank for source in needed)
            writer = 0 if is_of_rank else num_bytes_of_rank.index(min(num_bytes_of_rank))
            num_bytes_of_rank[writer] += tensor.numel() * tensor.element_size()
            if writer == rank and failure is None:
                written.add(path)
                try:
                    # A real tensor is small, and equal on all ranks.
                    full = state.recorder.materialize(tensor)
                    write_tensor(path, layout.offsets[name], full.cpu().contiguous())
                except (CheckpointError, OSError) as error:
                    # The other ranks still gather: all raise it together.
                    failure = CheckpointError(f"{name} cannot be written: {error}")
    _load([], in_use)

    def end() -> None:
        if failure is not None:
            raise failure
        for path in written:
            sync(path)

    on_all_ranks(end, lambda _: None)


def _load(needed: Sequence[ParameterSource], in_use: Sequence[ParameterSource]) -> None:
    """Gather the values of `needed`; free those of `in_use` that are not. Collective."""
    for source in in_use:
        if source not in needed:
            source.values = None
    for source in needed:
        source.load()


def _put_in_place(staging: Path, target: Path, weights: Sequence[Path]) -> None:
    """Move all files of `staging` to `target`, weights before the index; delete stale weights
    there, and `staging`.

    Args:
        weights: names of the weight files, relative to `staging`.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        if not target.exists():
            os.rename(staging, target)
            return

        names = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
        is_index = {name: name.name.endswith(".index.json") for name in names}
        names.sort(key=lambda name: (is_index[name], name not in weights, str(name)))
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target / name)
        _remove_stale(target, names)
        _delete_folder(staging)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}", "give a folder that may be written to"
        ) from error


def _remove_stale(target: Path, names: Sequence[Path]) -> None:
    """Remove files of weights of an earlier save, which another index named, if this one has
    weights of that kind.
    """
    current = {name.name for name in names}
    for pattern in ("model*.safetensors", "model*.safetensors.index.json"):
        for file in target.glob(pattern):
            if file.name not in current and any(name.match("model*.safetensors") for name in names):
                file.unlink()


def _delete_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def values_of(store: Any, full_shapes: Callable[[], AbstractContextManager[None]]) -> Values:
    """Return how the values of sharded parameters are read.

    Args:
        store: a ParameterStore; its parameters are sharded now.
        full_shapes: see `Values`.
    """

    def read(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return store.gather(tensor)
        return tensor.detach()

    return Values(store.full_shape, read, full_shapes)


def values_in_memory(full_shapes: Callable[[], AbstractContextManager[None]]) -> Values:
    """Return how the values of parameters are read that are full on every rank."""
    return Values(lambda parameter: parameter.shape, Tensor.detach, full_shapes)
