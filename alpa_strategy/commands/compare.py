"""`alpa compare`: a recipe on several clusters and under several named plans, in one table."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.commands.recipe_task import planned_recipe, split_overrides
from alpa_strategy.display.console import make_console, plain
from alpa_strategy.display.difference import meshes_of
from alpa_strategy.display.progress import Progress
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.fit.command import check_is_recipe
from alpa_strategy.ir.plan import Plan
from alpa_strategy.units import format_bytes, format_rate, format_seconds

HOUR = 3600.0


def add_arguments(compare: argparse.ArgumentParser) -> None:
    """Add the options of `alpa compare` to its parser; recipe and overrides are there already."""
    compare.add_argument(
        "--cluster",
        dest="clusters",
        action="append",
        required=True,
        metavar="CLUSTER",
        help="as for alpa plan; may be repeated",
    )
    compare.add_argument(
        "--parallel",
        action="append",
        metavar="NAME",
        help="auto, data, zero2, zero3 or tensor; may be repeated (auto)",
    )
    compare.add_argument(
        "--price",
        dest="prices",
        action="append",
        type=float,
        metavar="PRICE",
        help="of one device (not of a node) for an hour, one for each cluster in order",
    )
    compare.add_argument(
        "--nodes",
        action="append",
        type=int,
        metavar="NUMBER",
        help="of nodes, one for each cluster in order, in place of its own",
    )


@dataclass(frozen=True)
class Entry:
    """One cluster under one named plan."""

    cluster: ClusterSpec
    parallel: str

    # Of one device for an hour; None: not given.
    price: float | None

    # None: nothing fits, for the reason in `problem`.
    plan: Plan | None

    samples: int = 0
    problem: str = ""

    @property
    def samples_per_second(self) -> float:
        """Samples of a step per predicted second."""
        return self.samples / self.plan.predicted.step_seconds if self.plan is not None else 0.0

    @property
    def cost_per_million(self) -> float | None:
        """Price of a million samples on all devices; None if no price is given or nothing fits."""
        if self.price is None or self.plan is None:
            return None
        per_second = self.price * self.cluster.num_devices / HOUR
        return 1e6 / self.samples_per_second * per_second

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Price of a million tokens; None as of `cost_per_million`, and if samples have none."""
        cost = self.cost_per_million
        figures = None if self.plan is None else self.plan.figures
        if cost is None or figures is None or not figures.num_tokens:
            return None
        return cost * figures.num_samples / figures.num_tokens


def run(arguments: argparse.Namespace) -> int:
    """Plan every combination of `alpa compare`, print them with time, memory and cost, and return
    0.

    Raises:
        OptionError: the argument is no recipe, or there are not as many prices or numbers of nodes
            as clusters.
        AlpaError: a cluster or the recipe cannot be used.
    """
    check_is_recipe(arguments.recipe)
    for flag, values in (("--price", arguments.prices), ("--nodes", arguments.nodes)):
        if values and len(values) != len(arguments.clusters):
            raise OptionError(
                f"{len(values)} times {flag} for {len(arguments.clusters)} clusters",
                f"give {flag} once for each --cluster, in the same order",
            )
    entries = list(_entries(arguments))
    make_console().print(comparison_table(entries))
    return 0


def _entries(arguments: argparse.Namespace) -> Iterator[Entry]:
    """Plan the recipe for each cluster and each kind of parallelism, and yield the entries one by
    one; without a plan where a PlanError says that none fits. Other AlpaErrors are raised.

    Args:
        arguments: the parsed command line.
    """
    progress = Progress()
    to_cluster, overrides = split_overrides(arguments.overrides)
    for number, name in enumerate(arguments.clusters):
        of_cluster = dict(to_cluster)
        if arguments.nodes:
            of_cluster["num_nodes"] = str(arguments.nodes[number])
        cluster = ClusterSpec.load(name, of_cluster)
        price = arguments.prices[number] if arguments.prices else None
        for parallel in arguments.parallel or ["auto"]:
            changed = [*overrides, f"strategy.parallel={parallel}"]
            try:
                plan, task = planned_recipe(arguments.recipe, cluster, changed, progress)
            except PlanError as error:
                yield Entry(cluster, parallel, price, None, problem=error.problem)
                continue
            figures = plan.figures
            samples = task.step.batch_size if figures is None else figures.num_samples
            yield Entry(cluster, parallel, price, plan, samples)


def comparison_table(entries: Sequence[Entry]) -> Table:
    """Return a table with a row for each entry; that of the fastest is bold."""
    has_prices = any(entry.price is not None for entry in entries)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("cluster", "plan"):
        table.add_column(column, no_wrap=True)
    columns = ["devices", "step", "samples/s", "memory", "meshes"]
    if has_prices:
        columns.append("cost")
        table.caption = _cost_text(entries)
    for column in columns:
        # Meshes of many stages are as long as a line.
        is_long = column == "meshes"
        table.add_column(column, justify="right", no_wrap=not is_long, overflow="fold")

    fastest = max(entry.samples_per_second for entry in entries)
    for entry in entries:
        plan = entry.plan
        devices = str(entry.cluster.num_devices)
        start = plain(entry.cluster.name), plain(entry.parallel), devices
        if plan is None:
            table.add_row(*start, plain(_first_line(entry.problem)), style="dim")
            continue
        row = [
            format_seconds(plan.predicted.step_seconds),
            format_rate(entry.samples_per_second),
            format_bytes(plan.predicted.peak_bytes),
            meshes_of(plan),
        ]
        if has_prices:
            cost = entry.cost_per_million
            row.append("" if cost is None else f"{cost:.4g}")
        style = "bold" if entry.samples_per_second == fastest else None
        table.add_row(*start, *row, style=style)
    return table


def _cost_text(entries: Sequence[Entry]) -> str:
    """Return what the column of costs has, with the cost of a million tokens on each cluster if it
    is known.
    """
    text = "cost: of a million samples"
    of_tokens = []
    for entry in entries:
        cost = entry.cost_per_million_tokens
        if cost is not None:
            of_tokens.append(f"{cost:.3g}")
    if len(of_tokens) < len(entries):
        return text
    return f"{text}; of a million tokens: {', '.join(of_tokens)}"


def _first_line(problem: str) -> str:
    """Return why a plan does not fit, for a cell of the table."""
    return f"does not fit: {next(iter(problem.splitlines()), '')[:40]}"
