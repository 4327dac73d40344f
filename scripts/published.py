"""Published GPU runs against what the planner predicts for their own configurations.

    python scripts/published.py                                  # ../shared/published_results.json
    python scripts/published.py rows.json --out docs/figures     # other rows of the same form
    python scripts/published.py --source nanotron -v             # some of them, row by row

Every row that can be expressed is priced by the functions that the planner uses, in its own
configuration: data, tensor and pipeline parallel degrees, ZeRO, micro-batch, recomputation and
schedule are pinned. The others are listed with why.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from published_fit import fit
from published_price import Prediction, predict
from published_rows import Case, express

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT.parent / "shared" / "published_results.json"
# Sources on which the constants of configs/clusters and of cost/model.py were fitted; the others
# are held out.
FITTED = ("torchtitan H100", "llm-foundry H100 80GB BF16", "llm-foundry A100 80GB", "nanotron")
# Rank correlation that every source should reach.
RANK = 0.95
Priced = list[tuple[Case, Prediction]]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation of (x, y) pairs; ties have their mean rank.

    It is nan for fewer than three pairs, and if all values of one side are equal.
    """
    if len(pairs) < 3:
        return math.nan
    x, y = (_ranks(values) for values in zip(*pairs, strict=True))
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of `values` do not exceed; nan of none."""
    if not values:
        return math.nan
    index = min(len(values) - 1, math.ceil(share * len(values)) - 1)
    return sorted(values)[index]


def summary(name: str, priced: Priced) -> list[str]:
    """Return a row of the table."""
    errors = [p.seconds / c.seconds - 1 for c, p in priced]
    absolute = [abs(e) for e in errors]
    memory = [abs(p.num_bytes / c.num_bytes - 1) for c, p in priced if c.num_bytes]
    speeds = [
        (c.tokens / c.seconds / c.cluster.num_devices, c.tokens / p.seconds / c.cluster.num_devices)
        for c, p in priced
    ]
    rank = rank_correlation(speeds)
    return [
        name,
        str(len(priced)),
        f"{statistics.median(absolute):.1%}",
        f"{percentile(absolute, 0.9):.1%}",
        f"{statistics.median(errors):+.1%}",
        "" if math.isnan(rank) else f"{rank:.3f}",
        f"{statistics.median(memory):.0%} of {len(memory)}" if memory else "",
        f"{sum(p.fits for _, p in priced)} of {len(priced)}",
    ]


HOW = """Fitted are efficiencies of A100, H100 and H100 at 500 W, memory bandwidth reached,
overlap, and the share of the line rate between nodes. The fit is a coordinate descent over the
sources marked so, on the mean of |log error| per source. No constant belongs to a row. The forms
themselves were chosen with all of these sources in view.

Properties of a program that ours does not have are in `published_rows.PROGRAMS` and priced as that
program has them: prefetched parameters, gradients in fp32, a fused loss, re-gathered
sequence-parallel activations. `fit`: predicted to need at most the device's memory. Errors are of
the step's seconds; rank is Spearman's of tokens/s."""
HEADER = [
    "source",
    "rows",
    "error, median",
    "90th percentile",
    "signed",
    "rank",
    "memory, error",
    "fit",
]


def table(priced: Priced) -> list[list[str]]:
    """Return a row per source, of the sources for fitting, of the held-out ones, and of all."""
    sources = dict.fromkeys(case.source for case, _ in priced)
    lines = []
    for source in sources:
        name = f"fitted: {source}" if source in FITTED else source
        lines.append(summary(name, [(c, p) for c, p in priced if c.source == source]))
    fitted = [(c, p) for c, p in priced if c.source in FITTED]
    held_out = [(c, p) for c, p in priced if c.source not in FITTED]
    groups = {"all that were fitted on": fitted, "**all held out**": held_out, "all": priced}
    return [*lines, *(summary(name, group) for name, group in groups.items() if group)]


COLOURS = (
    "#5b8db8",
    "#b57fc0",
    "#74b38c",
    "#d08c5b",
    "#c7594f",
    "#7a6fb0",
    "#4a9a9a",
    "#a0a040",
    "#888888",
    "#d070a0",
    "#3b6f3b",
    "#b8a05b",
    "#505a6b",
)


def scatter_svg(priced: Priced, width: int = 860, height: int = 620) -> str:
    """Measured against predicted tokens/s per device, both logarithmic; the band is 10 %."""
    points = [
        (
            c.source,
            c.tokens / c.seconds / c.cluster.num_devices,
            c.tokens / p.seconds / c.cluster.num_devices,
        )
        for c, p in priced
    ]
    values = [speed for _, measured, predicted in points for speed in (measured, predicted)]
    low = math.log10(min(values)) - 0.1
    high = math.log10(max(values)) + 0.1
    left = 70
    bottom = height - 60
    size = height - 100

    def at(x: float, y: float) -> tuple[float, float]:
        scale = size / (high - low)
        return left + (math.log10(x) - low) * scale, bottom - (math.log10(y) - low) * scale

    body = []
    ends = 10 ** (low + 0.05), 10 ** (high - 0.05)
    band = [
        at(end, end * factor)
        for factor, order in ((1.1, 1), (1 / 1.1, -1))
        for end in ends[::order]
    ]
    body.append(
        f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in band)}" fill="#e8edf2"/>'
    )
    (x0, y0), (x1, y1) = at(ends[0], ends[0]), at(ends[1], ends[1])
    body.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#6b7785"/>')
    for power in range(math.ceil(low), math.floor(high) + 1):
        (x, _), (_, y) = at(10**power, 10**low), at(10**low, 10**power)
        body.append(f'<text x="{x:.0f}" y="{bottom + 20}" text-anchor="middle">1e{power}</text>')
        body.append(f'<text x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">1e{power}</text>')
        body.append(f'<path d="M{x:.0f} {bottom} v6 M{left} {y:.0f} h-6" stroke="#6b7785"/>')
    colour = dict(zip(dict.fromkeys(s for s, *_ in points), COLOURS * 4, strict=False))
    for source, measured, predicted in points:
        x, y = at(measured, predicted)
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour[source]}"'
            ' fill-opacity="0.75"/>'
        )
    body += _legend(colour, left + size + 30)
    body.append(
        f'<path d="M{left} {bottom - size} V{bottom} H{left + size}" stroke="#6b7785" fill="none"/>'
    )
    body.append(
        f'<text x="{left + size / 2}" y="{height - 18}" text-anchor="middle">measured tokens/s per'
        " GPU</text>"
    )
    body.append(f'<text x="{left}" y="26">predicted tokens/s per GPU (band: 10 %)</text>')
    return _svg(body, width, height)


def _svg(body: list[str], width: int, height: int) -> str:
    """Return a picture of the elements `body`."""
    inner = "\n".join(body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        f' height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="#1f2933">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{inner}\n</svg>\n'
    )


def _legend(colours: dict[str, str], x: int) -> list[str]:
    """Return a dot and the name of every source, one below the other from `x` on."""
    body = []
    for index, (source, colour) in enumerate(colours.items()):
        y = 50 + 22 * index
        body.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>')
        body.append(f'<text x="{x + 12}" y="{y + 4}">{source}</text>')
    return body


def markdown(lines: list[list[str]], header: Sequence[str] = HEADER) -> str:
    """As a table of a page."""
    rows = ["| " + " | ".join(line) + " |" for line in (header, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(header), *rows[1:]])


def ties(priced: Priced) -> list[str]:
    """Return a line per source whose rank is limited by ties: the largest possible rank.

    A tie is one configuration that was published with several values.
    """
    lines = []
    for source in dict.fromkeys(case.source for case, _ in priced):
        rows = [
            (c.tokens / c.seconds / c.cluster.num_devices, p.seconds / c.tokens, c)
            for c, p in priced
            if c.source == source
        ]
        alike = {}
        for _, x, _ in rows:
            alike[x] = [speed for speed, y, _ in rows if math.isclose(x, y)]
        same = [sorted(speeds) for speeds in alike.values() if len(set(speeds)) > 1]
        most = rank_correlation([(speed, statistics.fmean(alike[x])) for speed, x, _ in rows])
        if same and most < RANK:
            texts = []
            for speeds in same:
                texts.append(" and ".join(f"{v:.0f}" for v in speeds))
            values = "; ".join(texts)
            lines.append(
                f"- {source}: rows of one configuration have {values} tokens/s a device, so no more"
                f" than {most:.3f}"
            )
    return lines


def report(priced: Priced, refused: Counter[str], folder: Path) -> None:
    """docs/published.md and its picture."""
    text = [
        "# Published runs against predictions",
        "",
        "Generated by `scripts/published.py`; edit that.",
        "",
    ]
    text += [(__doc__ or "").split("\n\n")[-1].strip(), "", HOW, "", markdown(table(priced)), ""]
    if lines := ties(priced):
        text += [
            f"A rank of {RANK} is out of reach where what is priced alike was published with"
            " several values:"
        ]
        text += ["", *lines, ""]
    text += [
        "![Measured against predicted tokens/s](figures/published.svg)",
        "",
        "## Not expressed",
        "",
    ]
    text += [f"- {count} rows: {reason}" for reason, count in refused.most_common()]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "figures" / "published.svg").write_text(scatter_svg(priced))
    (folder / "published.md").write_text("\n".join(text) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="?", type=Path, default=ROWS)
    parser.add_argument(
        "--out", type=Path, help="folder for published.md and figures/published.svg"
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants on the sources in FITTED (minutes)"
    )
    parser.add_argument("--source", default="", help="only sources that contain this")
    parser.add_argument("-v", "--verbose", action="store_true", help="row by row")
    args = parser.parse_args()
    rows = json.loads(args.rows.read_text())
    rows = rows["rows"] if isinstance(rows, dict) else rows
    if args.fit:
        expressed = [express(row) for row in rows]
        cases = [case for case in expressed if isinstance(case, Case)]
        fitted = [case for case in cases if case.source in FITTED]
        fit([case for case in fitted if args.source in case.source])
        return
    priced: Priced = []
    refused: Counter[str] = Counter()
    for row in rows:
        case = express(row)
        if isinstance(case, str):
            refused[case] += 1
            if args.verbose:
                print(f"{row['id']:4} not expressed: {case}")
            continue
        if args.source not in case.source:
            continue
        started = time.perf_counter()
        found = predict(case)
        priced.append((case, found))
        if args.verbose:
            memory = f"{found.num_bytes / 2**30:6.1f}" + (
                f"/{case.num_bytes / 2**30:.1f}" if case.num_bytes else ""
            )
            print(
                f"{case.row:4} {case.source:24} {case.name[:18]:18} dp{case.dp:<4} tp{case.tp:<2}"
                f" pp{case.pp:<2} "
                f"z{case.zero} {case.recompute:5} {found.seconds:9.4f} s of {case.seconds:9.4f} "
                f"{found.seconds / case.seconds - 1:+7.1%}  {memory} GiB"
                f" {'' if found.fits else 'too much'} "
                f"({time.perf_counter() - started:.1f} s)",
                flush=True,
            )
    if not priced:
        sys.exit("no row can be expressed")
    print(markdown(table(priced)))
    for reason, count in refused.most_common():
        print(f"not expressed: {count} rows: {reason}")
    if args.out is not None:
        report(priced, refused, args.out)


if __name__ == "__main__":
    main()
