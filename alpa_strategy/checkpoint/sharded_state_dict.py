"""The state of a sharded training, parameters and the optimizer's, between whole tensors (before
and after it, in checkpoints) and the parts that this rank holds of them.

The optimizer object, its groups and its parameters stay the same; only the tensors of `state` that
have a parameter's shape are cut or gathered. Every rank keeps the state of its own stages'
parameters; a checkpoint holds all of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from alpa_strategy.capture.python_state import standing_in
from alpa_strategy.checkpoint.on_demand import Entry, LazyEntryGather
from alpa_strategy.checkpoint.tensors import LocalShards, StoredTensor, read_chunks
from alpa_strategy.errors import CheckpointError
from alpa_strategy.runtime.parameters import ParameterStore
from alpa_strategy.runtime.sharded_parameter import Chunk

Place = Callable[
    [nn.Parameter, Tensor], Any
]  # (parameter, this rank's part of a tensor that lies like it)


def shards_to_write(
    store: ParameterStore, on_demand: LazyEntryGather
) -> Callable[..., LocalShards]:
    """Says what this rank writes of a tensor that lies as a parameter does (the parameter itself, a
    moment of it).

    Of the ranks that hold the same part, each writes about as many bytes as the others. Every rank
    goes through all parameters in the same order, so that all come to the same shares.

    Args:
        on_demand: gathers what hooks compute with.
    """
    loads: dict[
        int, list[int]
    ] = {}  # number of ranks that hold the same part -> what each of them has to write
    which, of = store.copies

    def shards(parameter: nn.Parameter, tensor: Tensor, is_value: bool = False) -> LocalShards:
        shape = store.whole_shape(parameter)
        replica = store.replica(
            parameter
        )  # which of how many equal copies this rank holds; None: no part of it
        chunks: Sequence[Chunk] = ()
        if replica is not None:
            index, count = replica[0] + which * replica[1], replica[1] * of
            own = loads.setdefault(count, [0] * count)
            writer = own.index(min(own))
            own[writer] += shape.numel() * tensor.element_size()
            chunks = store.chunks(parameter, tensor) if writer == index else ()
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
    """Makes a full tensor of one that lies as a parameter does; `is_value`: of the parameter."""
    shape = store.whole_shape(parameter)

    def gather() -> Tensor:
        return store.gather_like(parameter, tensor).to(tensor.device)

    def put(full: Tensor) -> None:
        full = full.view(shape)
        tensor.copy_(store.shard_like(parameter, full))
        if is_value and parameter.shape == shape:  # a hook sees the module with full parameters
            parameter.data.copy_(full)

    return on_demand.add(gather, put, is_local=parameter not in store.sharded_parameters)


def module_state(
    module: nn.Module, store: ParameterStore, on_demand: LazyEntryGather
) -> dict[str, Any]:
    """`module.state_dict()` with `LocalShards` in the place of parameters, whatever the module
    makes of its names.
    """
    shards = shards_to_write(store, on_demand)
    with standing_in(
        module, {p: shards(p, p.detach(), is_value=True) for p in module.parameters()}
    ):  # tied ones are written once
        return module.state_dict()


# Reading into a module, or into the parts of it that this rank holds


def load_parameters(state_dict: Mapping[str, Tensor], store: ParameterStore) -> None:
    """Read this rank's part of the parameters that `state_dict` names into `store`. No
    communication.

    Args:
        state_dict: names among those of `store`'s parameters -> whole tensor, on disk
            (`open_checkpoint(path)["state_dict"]`) or in memory.

    Raises:
        CheckpointError: a parameter has another shape there.
    """
    for parameter in store.parameters:
        source, shape = state_dict.get(store.name_of(parameter)), store.whole_shape(parameter)
        if source is None:
            continue
        if source.shape != shape:
            raise CheckpointError(
                f"{store.name_of(parameter)} has shape {list(source.shape)} in the checkpoint and"
                f" {list(shape)} here",
                "load a checkpoint of the same model",
            )
        read_chunks(source, store.chunks(parameter, parameter.detach()))


def load_others(
    module: nn.Module, state_dict: Mapping[str, Tensor], store: ParameterStore, strict: bool
) -> None:
    """`module.load_state_dict(state_dict, strict)`, without the values of the parameters in
    `store`.

    Raises:
        RuntimeError: as torch does, when `strict` and a name is missing or surplus, or a shape
            another one.
    """
    shapes = {
        p: torch.empty(store.whole_shape(p), device="meta")
        for p in module.parameters()
        if p in store
    }
    try:
        with standing_in(module, shapes):
            module.load_state_dict(state_dict, strict)
    except RuntimeError:  # torch makes one text of all that went wrong
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
    """Read this rank's part of the optimizer's state, by number of the parameter; its groups stay
    as they are.

    Args:
        stored: as in a plain optimizer's state dict, with whole tensors on disk or in memory.
    """
    now = optimizer.state_dict()
    state = {}
    for parameter, number in numbers_of(optimizer, now).items():
        if number in stored and store.holds(parameter):
            state[number] = {
                key: _local(value, parameter, store) for key, value in stored[number].items()
            }
    optimizer.load_state_dict({**now, "state": state})


def _local(value: Any, parameter: nn.Parameter, store: ParameterStore) -> Any:
    if not isinstance(value, Tensor):
        return value
    if parameter in store and value.dim() > 0 and value.shape == store.whole_shape(parameter):
        local = torch.empty(parameter.shape, dtype=value.dtype, device=parameter.device)
        read_chunks(value, store.chunks(parameter, local))
        return local
    return value.whole() if isinstance(value, StoredTensor) else value.clone()


@torch.no_grad()
def shard_state(
    optimizer: Optimizer, store: ParameterStore, values: Callable[[Tensor], Tensor]
) -> None:
    """Keep this rank's part of every state tensor (`values` gives the whole of one), nothing of
    what it lacks.
    """
    for parameter in parameters_of(optimizer):
        if parameter not in optimizer.state:
            continue
        if not store.holds(parameter):
            del optimizer.state[parameter]
            continue
        state = optimizer.state[parameter]
        whole = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        state.update(
            {key: store.shard_like(parameter, values(value)) for key, value in whole.items()}
        )


def unshard_state(optimizer: Optimizer, store: ParameterStore) -> None:
    """Give every rank the whole state of every parameter. Collective."""

    def whole(parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        return store.gather_like(parameter, tensor).to(
            parameter.device
        )  # where the optimizer has it

    for parameter, state in _states(optimizer, store, whole):
        optimizer.state[parameter].update(state)


def state_dict_with(optimizer: Optimizer, store: ParameterStore, place: Place) -> dict[str, Any]:
    """`optimizer.state_dict()` of all stages' parameters, on every rank. Collective.

    Args:
        place: gives what stands for a tensor that lies as its parameter does; outside of the stage
            that owns the parameter it gets an empty one. It is called in the same order on all
            ranks.
    """
    result = optimizer.state_dict()
    numbers = numbers_of(optimizer, result)
    state = {numbers[parameter]: state for parameter, state in _states(optimizer, store, place)}
    return {
        **result,
        "state": {number: state[number] for number in numbers.values() if number in state},
    }


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the groups' order: the same on every rank, as collectives need it."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def numbers_of(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[nn.Parameter, int]:
    """Parameter -> its number in the optimizer's state dict."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return dict(zip(parameters_of(optimizer), numbers, strict=True))


@torch.no_grad()
def _states(
    optimizer: Optimizer, store: ParameterStore, place: Place
) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """(parameter, its state with `place`d tensors) of all that have one, one after the other on all
    ranks together.
    """
    states = {p: optimizer.state[p] for p in parameters_of(optimizer) if p in optimizer.state}
    said = store.said_by_owners(
        {p: {k: _described(v, p) for k, v in state.items()} for p, state in states.items()}
    )
    for parameter in (each for each in parameters_of(optimizer) if each in said):
        own = optimizer.state.get(parameter, {})
        state: dict[str, Any] = {}
        for key, (what, lies_like_it, is_on_device) in said[parameter].items():
            if not isinstance(what, Tensor) or not what.is_meta:
                state[key] = own.get(key, what.to(parameter.device) if is_on_device else what)
                continue
            part = own.get(key, torch.empty(0, dtype=what.dtype))
            if lies_like_it:
                state[key] = place(parameter, part)
            else:  # rows and columns of a factored moment: whole in the owning stage
                state[key] = store.gather_like(parameter, part, what.shape)
        yield parameter, state


def _described(value: Any, parameter: nn.Parameter) -> tuple[Any, bool, bool]:
    """For other ranks: a tensor of state with dims, without values; or anything else, which is the
    same on all ranks
    (step counters travel on the host). Whether it is cut as the parameter is, and whether it is on
    the device."""
    if not isinstance(value, Tensor):
        return value, False, False
    lies = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return (
        lies if value.dim() > 0 else value.detach().cpu(),
        value.shape == parameter.shape,
        value.device.type != "cpu",
    )
