"""The graphs of one captured step in micro-batches."""

from alpa_strategy.ir.graph import StepGraph
from alpa_strategy.microbatch.transform import microbatch, ranks_with_samples


class MicrobatchedGraphs:
    """Graphs of one micro-batch of `step`, each made once for all clusters and options."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        # By number of micro-batches, and of the ranks of whose samples they have parts.
        self._graphs: dict[tuple[int, int], StepGraph] = {}

    def graph(self, num_microbatches: int, num_devices: int) -> StepGraph:
        """Return the graph of one of `num_microbatches` on `num_devices`, made at the first call.

        Raises:
            PlanError: the step cannot be split so.
        """
        num_ranks = ranks_with_samples(self.step, num_devices)
        key = num_microbatches, num_ranks
        if key not in self._graphs:
            self._graphs[key] = microbatch(self.step, num_microbatches, num_ranks).graph
        return self._graphs[key]
