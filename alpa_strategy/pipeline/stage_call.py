"""A `LoweredStep` as a stage's program: inputs by value, what is made once per step, ZeRO-3's regathering; whole, or as
the spans of a stage that recomputes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from alpa_strategy.comm.mesh import MeshComm
from alpa_strategy.comm.random import ShardedRandom
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.ir.plan import StagePlan
from alpa_strategy.lower.lower import LoweredStep, lower_stage
from alpa_strategy.pipeline.derived import DerivedValues
from alpa_strategy.pipeline.program import StageInputs, Values
from alpa_strategy.pipeline.recompute import Span
from alpa_strategy.pipeline.stage_worker import Parameters


class StageParameters(Parameters, Protocol):
    """What a stage's program asks of its parameters' store."""

    def regather_hooks(self) -> AbstractContextManager[Any]:
        """Context for the forward: what the step gathers at use is gathered again for the backward."""
        ...


class StageCall:
    """A `LoweredStep` in the form of a `StageProgram`; its `run_span` is a `SpanProgram`.

    Args:
        graph: what was lowered.
        step: the whole micro-batched step, whose batch is handed in by position.
        derived: what is made of the parameters once per step.
    """

    def __init__(
        self,
        lowered: LoweredStep,
        graph: StepGraph,
        step: StepGraph,
        stage: StagePlan,
        store: StageParameters,
        derived: DerivedValues,
    ) -> None:
        self.lowered, self._derived = lowered, derived
        position = {leaf.value: i for i, leaf in enumerate(step.batch)}
        self._batch = tuple(position[leaf.value] for leaf in graph.batch)
        self._received = graph.received
        self._store = store
        plans = [stage.parameter_plans[p.name] for p in graph.parameters]
        self._gathers_at_use = any(mode[0] == "S" for plan in plans for mode in plan.modes)

    def __call__(self, inputs: StageInputs) -> tuple[Values, Values]:
        return self.run_span(inputs)[:2]

    def run_span(self, inputs: StageInputs) -> tuple[Values, Values, Values]:
        """See `SpanProgram`."""
        rows = [inputs.batch[i] for i in self._batch]
        handed = [inputs.received[v] for v in self._received]
        parameters = self._derived.beside(inputs.parameters, inputs.buffers)
        with self._store.regather_hooks() if self._gathers_at_use else nullcontext():
            return self.lowered.run_span(parameters, inputs.buffers, rows, handed)


def stage_calls(
    step: StepGraph,
    stage: StagePlan,
    mesh: MeshComm,
    device: torch.device,
    random: ShardedRandom,
    store: StageParameters,
) -> tuple[list[StageCall], list[Span], DerivedValues]:
    """What runs a stage of `step` on this device: its spans (one, or those that it recomputes) as calls and as what
    `Recompute` takes, and what they make of the parameters once per step."""
    lowered_stage = lower_stage(step, stage, mesh, device, random)
    derived = DerivedValues(lowered_stage.per_step)
    calls: list[StageCall] = []
    spans: list[Span] = []
    used: set[str] = set()
    for graph, lowered in lowered_stage.spans:
        trained = lowered_stage.derived.parameters_of(graph)
        calls.append(StageCall(lowered, graph, step, stage, store, derived))
        spans.append(
            Span(
                calls[-1].run_span,
                graph.received,
                tuple(value for value in lowered.made if step.values[value].requires_grad),
                frozenset(trained & used),
            )
        )
        used |= trained
    return calls, spans, derived
