"""From a request to a task of the planner."""

from dataclasses import dataclass, replace
from functools import cached_property

from alpa_strategy.capture.capture import capture_step
from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.fit.microbatched import MicrobatchedGraphs
from alpa_strategy.fit.module import LanguageModel, autocast_of, build_module, example_batch
from alpa_strategy.fit.optimizers import check_optimizer, optimizer_of
from alpa_strategy.fit.request import FitRequest, checked
from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.task import PlanTask, Progress


@dataclass(frozen=True)
class FitTask:
    """A request that was captured: everything that plans for any cluster need."""

    request: FitRequest
    module: LanguageModel
    step: StepGraph

    # Of `step`; plans for all clusters and options share them.
    graphs: MicrobatchedGraphs

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def num_trained(self) -> int:
        """Elements of the parameters that are trained."""
        trained = [p.numel() for p in self.module.parameters() if p.requires_grad]
        return sum(trained)

    def plan_task(self, cluster: ClusterSpec, options: PlanOptions, progress: Progress) -> PlanTask:
        """Return the planner's task for a cluster."""
        optimizer = optimizer_of(self.request.optimizer, self.module)
        return PlanTask(self.step, cluster, global_batch(options), optimizer, progress=progress)


def global_batch(options: PlanOptions) -> PlanOptions:
    """Return the options for a batch of all devices together."""
    return replace(options, batch_scope="global")


def captured(request: FitRequest, num_devices: int, progress: Progress) -> FitTask:
    """Return the task of a request: its module on the meta device, and the captured step.

    Args:
        num_devices: that share the batch.

    Raises:
        OptionError: a value of the request is wrong.
        CaptureError: the model's step cannot be captured.
        SetupError: transformers, or another library that it needs, is not installed.
    """
    check_optimizer(request.optimizer)
    request = checked(request)
    with progress("build the model on the meta device"):
        module = build_module(request)
    with progress("capture"):
        step = capture_step(
            module,
            example_batch(request),
            world_size=num_devices,
            batch_scope="global",
            context=autocast_of(request.precision),
        )
    return FitTask(request, module, step, MicrobatchedGraphs(step))
