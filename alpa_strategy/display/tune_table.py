"""What `alpa plan --tune batch_size` found, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from alpa_strategy.ir.plan import Plan
from alpa_strategy.units import format_bytes, format_seconds


def tune_table(found: Mapping[int, Plan | Exception], best: int | None, num_ranks: int) -> Table:
    """One row a batch size; `num_ranks`: of those that bring a batch each."""
    table = Table()
    for name in ("data.batch_size", "rows a step", "micro-batches", "stages", "step", "samples/s", "memory"):
        table.add_column(name, justify="right")
    for size, plan in found.items():
        rows = size * num_ranks
        if not isinstance(plan, Plan):
            table.add_row(str(size), str(rows), str(plan).splitlines()[0][:60], *[""] * 4, style="dim")
            continue
        seconds, parts = plan.predicted.step_seconds, plan.num_microbatches
        table.add_row(
            str(size),
            str(rows),
            f"{parts} of {rows // parts}",
            f"{len(plan.stages)} {plan.schedule}" if len(plan.stages) > 1 else "1",
            format_seconds(seconds),
            f"{rows / seconds:.4g}",
            format_bytes(plan.predicted.peak_bytes),
            style="bold green" if size == best else None,
        )
    return table
