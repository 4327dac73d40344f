"""State dicts of a sharded training: conversions between full tensors (before and after training,
in checkpoints) and this rank's shards, of parameters and of the optimizer's state.

The optimizer object, its groups and its parameters stay the same; only the tensors of `state` that
have a parameter's shape are sharded or gathered. Every rank stores the state of the parameters of
its stages; a checkpoint has all of it. Likewise for the states of optimizers that it holds.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import standing_in
from alpa_strategy.checkpoint.on_demand import Entry, LazyEntryGather
from alpa_strategy.checkpoint.owner_state import (
    ConvertOwned,
    converted_state,
    described_state,
    state_in_full,
)
from alpa_strategy.checkpoint.tensors import LocalShards, StoredTensor, read_chunks
from alpa_strategy.errors import CheckpointError
from alpa_strategy.ir.held_optimizers import held_by, parameters_in, states_in
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.sharded_parameter import Chunk

# (parameter, this rank's shard of a tensor that is laid out as it) -> what a state dict has for it.
Convert = Callable[[nn.Parameter, Tensor], Any]


def shards_to_write(
    store: ParameterStore, on_demand: LazyEntryGather
) -> Callable[..., LocalShards]:
    """Return a function of (parameter, tensor) that returns the `LocalShards` that this rank
    writes.

    The tensor is laid out as the parameter is: the parameter itself (then `is_value`), or a moment
    of it. One of the ranks that store the same shard writes it: the one that has to write the
    fewest bytes so far. On the others, the result has no chunks. Every rank has to call the
    function for all parameters in the same order, so that all compute the same division of work.

    Args:
        store: of the parameters.
        on_demand: gets an entry for each tensor: it gathers the full one if a user's hook computes
            with it.
    """
    # Number of ranks that store the same shard -> bytes that each of them has to write.
    bytes_to_write: dict[int, list[int]] = {}
    copy_index, num_copies = store.copies

    def shards(parameter: nn.Parameter, tensor: Tensor, is_value: bool = False) -> LocalShards:
        shape = store.full_shape(parameter)
        chunks: Sequence[Chunk] = ()

        # None if this rank stores none of the parameter.
        replica = store.replica(parameter)
        if replica is not None:
            index_in_store, num_in_store = replica
            index = index_in_store + copy_index * num_in_store
            count = num_in_store * num_copies
            loads = bytes_to_write.setdefault(count, [0] * count)
            writer = loads.index(min(loads))
            loads[writer] += shape.numel() * tensor.element_size()
            if writer == index:
                chunks = store.chunks(parameter, tensor)
        entry = _entry(store, on_demand, parameter, tensor, is_value)
        entry.held = LocalShards(shape, tensor.dtype, chunks, entry, device=tensor.device)
        return entry.held

    return shards


def _entry(
    store: ParameterStore,
    on_demand: LazyEntryGather,
    parameter: nn.Parameter,
    tensor: Tensor,
    is_value: bool,
) -> Entry:
    """Add an entry for a tensor that is laid out as `parameter` to `on_demand`, and return it.

    Args:
        store: of the parameters.
        on_demand: of the checkpoint that is being made.
        parameter: of the module.
        tensor: this rank's shard.
        is_value: whether the tensor is the parameter itself.
    """
    shape = store.full_shape(parameter)

    def gather() -> Tensor:
        return store.gather_like(parameter, tensor).to(tensor.device)

    def put(full: Tensor) -> None:
        full = full.view(shape)
        tensor.copy_(store.shard_like(parameter, full))
        if is_value and parameter.shape == shape:
            # Hooks see the module with full parameters.
            parameter.data.copy_(full)

    return on_demand.add(gather, put, is_local=parameter not in store.sharded_parameters)


def module_state(
    module: nn.Module, store: ParameterStore, on_demand: LazyEntryGather
) -> dict[str, Any]:
    """Return `module.state_dict()` with `LocalShards` in the place of parameters.

    The names are those of the module's own `state_dict`. A tied parameter has one `LocalShards`
    under all its names, so that it is written once. `on_demand` gets an entry for each parameter.
    """
    shards = shards_to_write(store, on_demand)
    replacements = {p: shards(p, p.detach(), is_value=True) for p in module.parameters()}
    with standing_in(module, replacements):
        return module.state_dict()


# Reading into a module, or into this rank's shards of it


def load_parameters(state_dict: Mapping[str, Tensor], store: ParameterStore) -> None:
    """Read this rank's shards of the parameters that `state_dict` names. No communication.

    Args:
        state_dict: name of a parameter -> full tensor, on disk
            (`open_checkpoint(path)["state_dict"]`) or in memory. Other names are ignored.
        store: whose shards are written to.

    Raises:
        CheckpointError: a parameter has another shape in the checkpoint.
    """
    for parameter in store.parameters:
        name = store.name_of(parameter)
        source = state_dict.get(name)
        if source is None:
            continue
        shape = store.full_shape(parameter)
        if source.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(source.shape)} in the checkpoint and {list(shape)} here",
                "load a checkpoint of the same model",
            )
        read_chunks(source, store.chunks(parameter, parameter.detach()))


def load_others(
    module: nn.Module, state_dict: Mapping[str, Tensor], store: ParameterStore, strict: bool
) -> None:
    """Call `module.load_state_dict(state_dict, strict)` without the values of parameters in
    `store`.

    Raises:
        RuntimeError: as of torch, if `strict` and a name is missing or surplus, or if a shape
            differs.
        CheckpointError: a value is missing in the checkpoint, or cannot be read.
    """
    without_values: dict[nn.Parameter, Tensor] = {}
    for parameter in module.parameters():
        if parameter in store:
            shape = store.full_shape(parameter)
            without_values[parameter] = torch.empty(shape, device="meta")
    try:
        with standing_in(module, without_values):
            module.load_state_dict(state_dict, strict)
    except RuntimeError:
        # Torch has made one text of all errors: the first cause is raised instead.
        for name, value in state_dict.items():
            if isinstance(value, StoredTensor) and value.failure is not None:
                raise value.failure from None
            if value is None:
                raise CheckpointError(
                    f"the checkpoint has no values of {name!r}", "load another one"
                ) from None
        raise


# The optimizer's state


@torch.no_grad()
def restore_state(
    optimizer: Optimizer, stored: Mapping[int, Mapping[str, Any]], store: ParameterStore
) -> None:
    """Read this rank's shards of the optimizer's state; the optimizer's groups stay as they are.
    State that is not in `stored` is dropped.

    Args:
        optimizer: of the sharded parameters.
        stored: the `state` of a plain optimizer's state dict: number of the parameter -> its state,
            with full tensors on disk or in memory.
        store: of the parameters.
    """
    current = optimizer.state_dict()
    state = {}
    for parameter, number in numbers_of(optimizer, current).items():
        if number in stored and store.has_state(parameter):
            state[number] = {
                key: _local(value, parameter, store) for key, value in stored[number].items()
            }
    optimizer.load_state_dict({**current, "state": state})


def _local(value: Any, parameter: nn.Parameter, store: ParameterStore) -> Any:
    """Return this rank's shard of a state value if it has the parameter's full shape, else a copy
    of all. A parameter that is stepped in full gets all of it.
    """
    if store.is_stepped_in_full(parameter):
        return state_in_full(value)
    if not isinstance(value, Tensor):
        return value
    if parameter in store and value.dim() > 0 and value.shape == store.full_shape(parameter):
        local = torch.empty(parameter.shape, dtype=value.dtype, device=parameter.device)
        read_chunks(value, store.chunks(parameter, local))
        return local
    return value.full_tensor() if isinstance(value, StoredTensor) else value.clone()


@torch.no_grad()
def shard_state(
    optimizer: Optimizer, store: ParameterStore, values: Callable[[Tensor], Tensor]
) -> None:
    """Replace every state tensor by this rank's shard, and drop the state of parameters of which
    this rank stores nothing.

    Args:
        optimizer: of the parameters.
        store: of the parameters.
        values: returns the full values of a state tensor.
    """
    for state in states_in(optimizer):
        for parameter in parameters_in(optimizer):
            if parameter not in state:
                continue
            if not store.has_state(parameter):
                del state[parameter]
            elif store.is_stepped_in_full(parameter):
                state[parameter] = state_in_full(state[parameter], values)
            else:
                of_parameter = state[parameter]
                for key, value in list(of_parameter.items()):
                    if isinstance(value, Tensor):
                        of_parameter[key] = store.shard_like(parameter, values(value))


def unshard_state(optimizer: Optimizer, store: ParameterStore) -> None:
    """Give every rank the full state of every parameter, on the parameter's device. Collective."""

    def full(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return store.gather_like(parameter, tensor).to(parameter.device)

    def full_of_owner(parameter: nn.Parameter, tensor: Tensor, shape: torch.Size) -> Tensor:
        return store.state_of_owner(parameter, tensor, shape).to(parameter.device)

    for state in states_in(optimizer):
        for parameter, values in _full_states(optimizer, state, store, full, full_of_owner):
            state.setdefault(parameter, {}).update(values)


def state_dict_with(
    optimizer: Optimizer,
    store: ParameterStore,
    convert: Convert,
    convert_owned: ConvertOwned | None = None,
) -> dict[str, Any]:
    """Return `optimizer.state_dict()` of all stages' parameters, on every rank. Collective.

    Args:
        optimizer: of the parameters.
        store: of the parameters.
        convert: returns the entry for a tensor that is laid out as its parameter. Outside of the
            stage that owns the parameter it gets an empty tensor. It is called in the same order on
            all ranks.
        convert_owned: likewise for a tensor that one device has; the full tensor by default.
    """
    convert_owned = convert_owned or store.state_of_owner
    states = states_in(optimizer)
    converted = []
    for state in states:
        converted.append(dict(_full_states(optimizer, state, store, convert, convert_owned)))
    if not holds_others(optimizer):
        result = optimizer.state_dict()
        numbers = numbers_of(optimizer, result)
        (state_of,) = converted
        of_numbers = {number: state_of[p] for p, number in numbers.items() if p in state_of}
        return {**result, "state": of_numbers}
    # Its form is known to the optimizer alone.
    of_this_rank = [dict(state) for state in states]
    _replace(states, converted)
    try:
        return _without_references(optimizer.state_dict())
    finally:
        _replace(states, of_this_rank)


def _replace(
    states: Sequence[MutableMapping[nn.Parameter, Any]],
    replacements: Sequence[Mapping[nn.Parameter, Any]],
) -> None:
    """Put other entries into states; the objects stay."""
    for state, replacement in zip(states, replacements, strict=True):
        state.clear()
        state.update(replacement)


def _without_references(tree: Any) -> Any:
    """Return a state dict with dictionaries and lists of its own."""
    if isinstance(tree, Mapping):
        return {key: _without_references(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_without_references(value) for value in tree]
    return tree


def holds_others(optimizer: Optimizer) -> bool:
    """Whether the optimizer holds others, so that its state dict may have any form."""
    return bool(held_by(optimizer))


def restore_held(optimizer: Optimizer, stored: Any, store: ParameterStore) -> None:
    """Load a state dict that an optimizer that holds others has made, and keep this rank's shards.

    Args:
        optimizer: of the parameters.
        stored: with full tensors on disk or in memory.
        store: of the parameters.
    """
    optimizer.load_state_dict(state_in_full(stored))
    shard_state(optimizer, store, lambda tensor: tensor)


def numbers_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[nn.Parameter, int]:
    """Return parameter -> its number in the optimizer's state dict."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return dict(zip(parameters_in(optimizer), numbers, strict=True))


class _StateValue(NamedTuple):
    """One value of a parameter's optimizer state, as the owning rank describes it to the others."""

    # A tensor with dims as a meta tensor, without values; anything else itself, which is the same
    # on all ranks (step counters, on the host).
    value: Any

    # Whether it is sharded as the parameter is.
    is_laid_out_alike: bool

    # Whether it is on the device.
    is_on_device: bool


@torch.no_grad()
def _full_states(
    optimizer: Optimizer,
    state: Mapping[nn.Parameter, Any],
    store: ParameterStore,
    convert: Convert,
    convert_owned: ConvertOwned,
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Yield (parameter, its state with converted tensors) for all that have one.

    Collective: all ranks go through the parameters in the same order.

    Args:
        optimizer: of the parameters.
        state: its own, or that of one that it holds.
        store: of the parameters.
        convert, convert_owned: as for `state_dict_with`.
    """
    descriptions: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter in parameters_in(optimizer):
        if parameter not in state:
            continue
        if store.is_stepped_in_full(parameter):
            descriptions[parameter] = described_state(state[parameter])
        else:
            of_parameter = state[parameter]
            descriptions[parameter] = {k: _described(v, parameter) for k, v in of_parameter.items()}
    of_owners = store.collect_from_owners(descriptions)

    for parameter in parameters_in(optimizer):
        if parameter not in of_owners:
            continue
        if store.is_stepped_in_full(parameter):
            state_here = state.get(parameter) if store.has_state(parameter) else None
            description = of_owners[parameter]
            converted = converted_state(
                parameter, description, state_here, convert_owned, store.state_of_owner
            )
            yield parameter, converted
            continue

        local_state = state.get(parameter, {})
        converted = {}
        for key, (value, is_laid_out_alike, is_on_device) in of_owners[parameter].items():
            if not isinstance(value, Tensor) or not value.is_meta:
                default = value.to(parameter.device) if is_on_device else value
                converted[key] = local_state.get(key, default)
                continue

            local = local_state.get(key, torch.empty(0, dtype=value.dtype))
            if is_laid_out_alike:
                converted[key] = convert(parameter, local)
            else:
                # Row and column statistics of a factored moment: full in the owning stage.
                converted[key] = store.gather_like(parameter, local, value.shape)
        yield parameter, converted


def _described(value: Any, parameter: nn.Parameter) -> _StateValue:
    """Return the description of a value of the optimizer's state for the other ranks: shape and
    dtype, but the value itself if it has no dims or is no tensor.

    Args:
        parameter: whose state it is.
    """
    if not isinstance(value, Tensor):
        return _StateValue(value, False, False)
    if value.dim() > 0:
        description = torch.empty(value.shape, dtype=value.dtype, device="meta")
    else:
        description = value.detach().cpu()
    is_laid_out_alike = value.shape == parameter.shape
    return _StateValue(description, is_laid_out_alike, value.device.type != "cpu")
