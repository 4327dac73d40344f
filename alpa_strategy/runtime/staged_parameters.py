"""StagedParameters: the parameters of all stages seen as one store. A rank holds those of its own stages only.

It has the interface of a `ParameterStore` where training uses it. Whatever gathers is collective over the whole job:
the stage that owns a parameter (the first that uses it) gathers it, and sends it to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.ir.graph import ParameterInput
from alpa_strategy.ir.plan import StagePlan, stage_parameters, stage_ranks
from alpa_strategy.runtime.parameter_data import replace_data
from alpa_strategy.runtime.parameters import ParameterStore


class StagedParameters:
    """Parameters that any stage uses, in the stages' order: the same on every rank.

    Args:
        module: the user's module, whole until `shard`.
        parameters: the step's.
        stores: this rank's stages -> store (`staged_step.stage_stores`), not sharded yet.
        mesh: of the whole job.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[ParameterInput],
        stages: Sequence[StagePlan],
        stores: Mapping[int, ParameterStore],
        mesh: MeshComm,
    ) -> None:
        self.mesh = mesh
        self._stores = list({id(store): store for store in stores.values()}.values())
        self._name: dict[nn.Parameter, str] = {}
        self._shape: dict[nn.Parameter, torch.Size] = {}
        self._by_name: dict[str, nn.Parameter] = {}
        self._source: dict[nn.Parameter, int] = {}  # the first rank of the stage that owns it
        self._owner: dict[nn.Parameter, ParameterStore] = {}  # of parameters that a stage of this rank owns
        self._held: dict[nn.Parameter, ParameterStore] = {}  # of all that this rank holds
        for index, stage in enumerate(stages):
            for given in stage_parameters(parameters, stage):
                parameter = module.get_parameter(given.name)
                if parameter not in self._name:
                    self._name[parameter] = given.name
                    self._shape[parameter] = parameter.shape
                    self._source[parameter] = stage_ranks(stage)[0]
                    if index in stores:
                        self._owner[parameter] = stores[index]
                if index in stores:
                    self._held.setdefault(parameter, stores[index])
                self._by_name.update(dict.fromkeys(given.names, parameter))

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """All stages' parameters, in the same order on every rank."""
        return tuple(self._name)

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """The step's name of a parameter, None when the step does not use it."""
        return self._name.get(parameter)

    @property
    def sharded_parameters(self) -> tuple[nn.Parameter, ...]:
        """Parameters that are not whole on every rank: all, for other ranks may lack what this one holds."""
        return tuple(self._name)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether a stage of this rank uses the parameter: it is empty here otherwise."""
        return parameter in self._held

    def owner(self, parameter: nn.Parameter) -> ParameterStore | None:
        """The store of the stage that owns the parameter, None when that is no stage of this rank."""
        return self._owner.get(parameter)

    def source(self, parameter: nn.Parameter) -> int:
        """The rank that speaks for the stage that owns the parameter."""
        return self._source[parameter]

    def whole_shape(self, name: str) -> torch.Size:
        """Shape of the whole parameter."""
        return self._shape[self._by_name[name]]

    def chunks(self, name: str, tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """The boxes of the whole parameter that this rank holds (see `ParameterStore.chunks`), if any."""
        parameter = self._by_name[name]
        store = self._held.get(parameter)
        return [] if store is None else store.chunks(self._name[parameter], tensor)

    def replica(self, name: str) -> tuple[int, int] | None:
        """Of the ranks that hold the same part: which one this is, and how many; None outside of the owning stage."""
        parameter = self._by_name[name]
        owner = self._owner.get(parameter)
        return None if owner is None else owner.replica(self._name[parameter])

    def counts_here(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's elements count in a sum over all ranks, in which every element counts once."""
        if parameter not in self._name:
            return dist.get_rank() == 0
        owner = self._owner.get(parameter)
        return owner is not None and owner.counts_here(parameter)

    def shard(self, values: Callable[[nn.Parameter], Tensor] = Tensor.detach) -> None:
        """Every rank keeps its parts of its stages' parameters; the others become empty. Once, before training.

        Args:
            values: see `ParameterStore.shard`.
        """
        for store in self._stores:
            store.shard(values)
        for parameter in self._name:
            if parameter not in self._held:
                replace_data(parameter, parameter.new_empty(0))
                parameter.grad = None

    def unshard(self) -> None:
        """Give every parameter its whole data back, on every rank. Collective; ends training with this store."""
        for store in self._stores:
            store.unshard()
        for parameter, name in self._name.items():
            if parameter not in self._owner:
                parameter.grad = None
            whole = parameter.detach() if parameter in self._owner else None
            replace_data(parameter, self.send_to_all(name, whole, parameter.dtype))

    def send_to_all(
        self, name: str, whole: Tensor | None, dtype: torch.dtype, shape: torch.Size | None = None
    ) -> Tensor:
        """`whole`, which the ranks of the owning stage have, on every rank. Collective.

        Args:
            shape: of `whole`, that of the parameter by default.
        """
        parameter = self._by_name[name]
        if whole is None:
            whole = torch.empty(
                self._shape[parameter] if shape is None else shape, dtype=dtype, device=parameter.device
            )
        whole = whole.contiguous()
        dist.broadcast(whole, src=self._source[parameter])
        return whole

    # What the Trainer's loop asks of a store: reductions are the pipeline's own business

    def sync(self, enabled: bool) -> None:
        """Nothing: a pipeline reduces the gradients of each of its steps."""

    def finish_backward(self) -> None:
        """Nothing: a pipeline's gradients are complete before the Trainer's backward."""

    def after_optimizer_step(self) -> None:
        """Drop gathered copies: the next step gathers the new values."""
        for store in self._stores:
            store.after_optimizer_step()

    def discard_gradients(self) -> None:
        """Forget what an interrupted or skipped backward left behind."""
        for store in self._stores:
            store.discard_gradients()

    # Whole values

    def gather(self, name: str) -> Tensor:
        """The whole parameter, on every rank. Collective."""
        return self.gather_like(name, self._by_name[name].detach())

    def gather_like(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of a tensor laid out as parameter `name` (its gradient), on every rank. Collective.

        On ranks that do not hold the parameter, only the dtype of `tensor` is looked at.
        """
        parameter = self._by_name[name]
        owner = self._owner.get(parameter)
        whole = None if owner is None else owner.gather_like(self._name[parameter], tensor)
        return self.send_to_all(name, whole, tensor.dtype)

    def shard_like(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part (a copy) of a tensor of parameter `name`'s whole shape; empty where it holds none."""
        parameter = self._by_name[name]
        store = self._held.get(parameter)
        return whole.new_empty(0) if store is None else store.shard_like(self._name[parameter], whole)

    def take_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Write this rank's part of parameter `name`, if it holds any, into `part`."""
        store = self._held.get(self._by_name[name])
        if store is not None:
            store.take_whole(self._name[self._by_name[name]], whole, part)
