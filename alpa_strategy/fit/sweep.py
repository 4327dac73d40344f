"""The same step on several numbers of devices, as a table with bars and as an SVG picture."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display.plan_words import plan_words
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.fit.changes import FitCase, plan_case
from alpa_strategy.ir.plan import Plan
from alpa_strategy.planner.task import Progress
from alpa_strategy.units import format_bytes, format_count

# Columns of the longest bar.
_BAR_WIDTH = 16

# Of the picture, in pixels.
_WIDTH = 640
_ROW = 28
_LABEL = 90


@dataclass(frozen=True)
class SweepPoint:
    """A number of devices with its plan, or why there is none."""

    cluster: ClusterSpec
    plan: Plan | PlanError
    tokens_per_second: float = 0.0
    mfu: float | None = None


def read_sweep(text: str, cluster: ClusterSpec) -> list[ClusterSpec]:
    """Return the cluster with each number of devices of `devices=8,16,32`.

    Raises:
        OptionError: the text has another form, or a number is 0, or more than a node but no full
            nodes.
    """
    match = re.fullmatch(r"devices=(\d{1,7}(?:,\d{1,7})*)", text)
    if match is None:
        raise OptionError(f"--sweep is {text!r}", "write --sweep devices=8,16,32")
    clusters = []
    for number in match[1].split(","):
        clusters.append(_with_devices(cluster, int(number)))
    return clusters


def _with_devices(cluster: ClusterSpec, num_devices: int) -> ClusterSpec:
    """Return the cluster with another number of devices: full nodes, or a part of one.

    Raises:
        OptionError: they are 0, or more than a node but no full nodes.
    """
    per_node = cluster.devices_per_node
    if 0 < num_devices < per_node:
        return replace(cluster, num_nodes=1, devices_per_node=num_devices)
    if num_devices == 0 or num_devices % per_node:
        raise OptionError(
            f"--sweep: {num_devices} devices are no full nodes of {per_node}",
            f"give multiples of {per_node}, or fewer",
        )
    return replace(cluster, num_nodes=num_devices // per_node)


def sweep(case: FitCase, clusters: Sequence[ClusterSpec], progress: Progress) -> list[SweepPoint]:
    """Return the plan of a case on each cluster, or the error of one on which nothing fits."""
    points = []
    for cluster in clusters:
        try:
            plan = plan_case(replace(case, cluster=cluster), progress)
        except PlanError as error:
            points.append(SweepPoint(cluster, error))
            continue
        figures = plan.figures
        seconds = plan.predicted.step_seconds
        share = None if figures is None else figures.mfu(seconds)
        points.append(SweepPoint(cluster, plan, case.request.tokens / seconds, share))
    return points


def best_point(points: Sequence[SweepPoint]) -> tuple[ClusterSpec, Plan]:
    """Return the cluster and the plan with the most tokens per second.

    Raises:
        PlanError: nothing fits on any number of devices.
    """
    best = max(points, key=lambda point: point.tokens_per_second)
    if isinstance(best.plan, PlanError):
        raise best.plan
    return best.cluster, best.plan


def sweep_table(points: Sequence[SweepPoint]) -> Table:
    """Return a table with a row for each number of devices, and bars of tokens per second."""
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for name in ("devices", "tokens/s", "", "MFU", "memory", "plan"):
        is_text = name in ("", "plan")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "plan")
    most = max(point.tokens_per_second for point in points)
    for point in points:
        if isinstance(point.plan, PlanError):
            table.add_row(str(point.cluster.num_devices), "", "does not fit", style="red")
            continue
        bar = "━" * round(_BAR_WIDTH * point.tokens_per_second / most)
        table.add_row(
            str(point.cluster.num_devices),
            format_count(point.tokens_per_second),
            bar,
            "" if point.mfu is None else f"{point.mfu:.1%}",
            format_bytes(point.plan.predicted.peak_bytes),
            plan_words(point.plan),
        )
    return table


def write_picture(path: str, points: Sequence[SweepPoint]) -> None:
    """Write the bars of tokens per second as an SVG file.

    Raises:
        OptionError: the file cannot be written.
    """
    most = max([1e-30, *(point.tokens_per_second for point in points)])
    rows = []
    for index, point in enumerate(points):
        y = _ROW * index
        width = (_WIDTH - 2 * _LABEL) * point.tokens_per_second / most
        fits = point.tokens_per_second > 0
        text = f"{format_count(point.tokens_per_second)} tokens/s" if fits else "does not fit"
        devices = point.cluster.num_devices
        rows.append(f'<text x="{_LABEL - 8}" y="{y + 19}" text-anchor="end">{devices}</text>')
        rows.append(
            f'<rect x="{_LABEL}" y="{y + 6}" width="{width:.1f}" height="16" fill="#4477aa"/>'
        )
        rows.append(f'<text x="{_LABEL + width + 6:.1f}" y="{y + 19}">{text}</text>')
    height = _ROW * len(points)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
    body = "\n".join(rows)
    picture = f'{head} font-family="sans-serif" font-size="13">\n{body}\n</svg>\n'
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written: {error.strerror}", "give another path"
        ) from None
