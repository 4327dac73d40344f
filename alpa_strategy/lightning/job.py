"""Job: where a run takes place, and what the user asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.options import Limits, PlanOptions

Progress = Callable[[str], AbstractContextManager[None]]
Say = Callable[[Any], None]


@dataclass(frozen=True)
class Job:
    """What planning and running need to know of the job.

    Attributes:
        num_nodes, devices_per_node: the job's shape.
        device: this rank's.
        options: planning options.
        limits: timeouts and sizes that no plan depends on.
        backend: library of the collectives: `auto`, `torch` or `deepspeed`.
        folder: `.alpa` folder: measurements below `costs`.
        plan_folder: the plan store.
        plan_file: a plan to use instead, or None.
        cluster: declared costs (spec, file or name), or None to measure.
        context: what surrounds `training_step` (autocast of the precision plugin).
        shows: whether this rank shows anything.
        progress: shows phases (where `shows`).
        say: prints a line or table (where `shows`).
    """

    num_nodes: int
    devices_per_node: int
    device: torch.device
    options: PlanOptions
    limits: Limits
    backend: str
    folder: Path
    plan_folder: Path
    plan_file: Path | None
    cluster: ClusterSpec | str | Path | None
    context: Callable[[], AbstractContextManager[None]]
    shows: bool
    progress: Progress
    say: Say


def make_console(shows: bool) -> tuple[Progress, Say]:
    """A Job's `progress` and `say`; silent ones load nothing."""
    if not shows:
        return _silent, lambda _: None
    from alpa_strategy.display import Progress

    progress = Progress(enabled=True)
    return progress, progress.console.print


@contextmanager
def _silent(name: str, detail: str = "") -> Iterator[None]:
    """A phase that is not shown."""
    yield
