"""Lightning's own tests that train on two CPU ranks, under "ddp" and under "alpa": what passes
there must pass here.

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning /tmp/pl
    .venv/bin/python scripts/lightning_tests.py /tmp/pl/tests [--only NAME] [--jobs 2] [--out
    results.json]

Each test that names a form of DDP runs by itself, first with Lightning's DDPStrategy, then, where
it passed and really
had two ranks, with AlpaStrategy in its place. Spawned and forked forms are started as scripts in
both: a test looks at results, and how processes begin is not what is compared. Nothing of the tests
is edited.

Their own requirements are wanted as well (`pip install pytest-rerunfailures`); files whose imports
are missing are left
out, with a line. Known to differ, of 2.6.5: assertions on DDPStrategy as a class (test_ddp_cpu, six
of test_trainer_config_strategy), a mock of Strategy.backward, which ours overrides
(test_swa_callback_ddp_cpu), and "only rank 0 calls torch.save"
(test_model_checkpoint_no_extraneous_invocations): all ranks write our checkpoints.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

# Not compared: files that are about the choice of a strategy, or about DDPStrategy's and
# DistributedDataParallel's own.
ABOUT_DDP = (
    "strategies/test_ddp.py",
    "strategies/test_ddp_integration_comm_hook.py",
    "strategies/test_registry.py",
    "strategies/launchers/",
    "trainer/connectors/test_accelerator_connector.py",
    "accelerators/",
    "deprecated_api/",
)
SECONDS = 240  # of one test; the ranks' imports are most of it

# Read by the `pytest` of every rank: puts the strategy in place and says how many ranks a Trainer
# had.
PLUGIN = '''
import os
import threading
import pytest
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector as connector

plain = connector._AcceleratorConnector.__init__


def placed(self, *args, strategy="auto", **others):
    name = strategy if isinstance(strategy, str) else "ddp" if type(strategy) is DDPStrategy else ""
    if name.startswith("ddp") and not name.startswith("ddp_custom"):
        if os.environ["UNDER"] == "alpa":
            from alpa_strategy import AlpaStrategy

            strategy = AlpaStrategy(verbose=False)
        else:
            strategy = "ddp_find_unused_parameters_true" if name.endswith("true") else "ddp"
    plain(self, *args, strategy=strategy, **others)
    if getattr(self.strategy, "num_processes", 1) > 1:
        with open(os.environ["RANKS_FILE"], "a") as out:
            out.write("2")


connector._AcceleratorConnector.__init__ = placed


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    """Wait for the thread that watches the ranks, as the tests wait for DDP's by its class.

    Any other thread that is left is an error for them.
    """
    for thread in threading.enumerate():
        if thread.name == "alpa-child-watch":
            thread.join(60)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Select standalone tests as well: every test has a process of its own here."""
    selected = []
    for item in items:
        marks = []
        for mark in item.own_markers:
            if mark.kwargs.get("reason") != "Requires: [Standalone execution]":
                marks.append(mark)
        item.own_markers[:] = marks
        skips = [mark for mark in marks if mark.name == "skipif"]
        if not any(mark.kwargs.get("condition") for mark in skips):
            selected.append(item)
    items[:] = selected
'''


def tests_that_name_ddp(root: Path) -> list[str]:
    """`file::function` of every test whose source, decorators included, names a form of DDP."""
    results = []
    for path in sorted((root / "tests_pytorch").rglob("test_*.py")):
        if any(part in str(path) for part in ABOUT_DDP):
            continue
        text = path.read_text()
        tree = ast.parse(text)
        helpers = {
            f.name
            for f in tree.body
            if isinstance(f, ast.FunctionDef) and "ddp" in _source(text, f).lower()
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                source = _source(text, node)
                if "ddp" in source.lower() or any(
                    f"{name}(" in source for name in helpers - {node.name}
                ):
                    results.append(f"{path.relative_to(root)}::{node.name}")
    return results


def _source(text: str, node: ast.FunctionDef) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def run(root: Path, tests: list[str], under: str, plugin: Path, *arguments: str) -> dict[str, Any]:
    """Pytest in a process of its own: whether it `passed`, whether a Trainer had two `ranks`, its
    output as `text`.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = Path(folder, "ranks")
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(plugin), str(Path(__file__).resolve().parents[1]), str(root)]
            ),
            "UNDER": under,
            "RANKS_FILE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": folder,
            # which we set, and a fixture of theirs takes for a leak
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        options = [
            "-p",
            "as_two_ranks",
            "-p",
            "no:cacheprovider",
            "-q",
            "--color=no",
            f"--rootdir={root}",
        ]
        command = [sys.executable, "-m", "pytest", *options, *arguments]
        with Path(folder, "output").open("w+") as out:
            job = subprocess.Popen(
                [*command, *tests],
                cwd=root,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = job.wait(SECONDS)
            except subprocess.TimeoutExpired:
                code = -1
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)  # ranks that are left
            out.seek(0)
            text = out.read() + ("\ndid not end" if code == -1 else "")
        return {
            "passed": code == 0 and " skipped" not in text,
            "ranks": ranks.exists(),
            "text": text,
        }


def compare(root: Path, test: str, plugin: Path) -> dict[str, Any]:
    """Both runs of one test."""
    results: dict[str, Any] = {"test": test, "ddp": run(root, [test], "ddp", plugin)}
    if results["ddp"]["passed"] and results["ddp"]["ranks"]:
        results["alpa"] = run(root, [test], "alpa", plugin)
    return results


def cases(root: Path, tests: list[str], plugin: Path) -> list[str]:
    """The parametrised cases of tests: each begins its ranks by running its own command again."""
    text = run(root, tests, "ddp", plugin, "--collect-only")["text"]
    lacking = {line.split()[1] for line in text.splitlines() if line.startswith("ERROR tests")}
    if lacking:  # of packages that are not installed
        print("not collected:", *sorted(lacking))
        return cases(
            root, [test for test in tests if test.partition("::")[0] not in lacking], plugin
        )
    return [line for line in text.splitlines() if "::" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path)
    parser.add_argument("--only", default="", help="part of a test's name")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    root = options.tests.resolve()
    tests = [name for name in tests_that_name_ddp(root) if options.only in name]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        Path(folder, "as_two_ranks.py").write_text(PLUGIN)
        results: list[dict[str, Any]] = []
        for result in pool.map(
            lambda test: compare(root, test, Path(folder)), cases(root, tests, Path(folder))
        ):
            results.append(result)
            ours = result.get("alpa")
            word = (
                "no two ranks, or not under ddp"
                if ours is None
                else "same"
                if ours["passed"]
                else "DIFFERS"
            )
            print(f"{word:32}{result['test']}", flush=True)
            if options.out:
                options.out.write_text(json.dumps(results, indent=1))
    counted = [result for result in results if "alpa" in result]
    num_passed = sum(result["alpa"]["passed"] for result in counted)
    print(f"{num_passed} of {len(counted)} pass under alpa as under ddp")
    sys.exit(any(not result["alpa"]["passed"] for result in counted))


if __name__ == "__main__":
    main()
