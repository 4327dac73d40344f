"""The worked examples of docs/extending.md run on public names alone, and the diffs of
CONTRIBUTING.md apply and do what is said.
"""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from template import run_script

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DIFFS = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)


def run(code: str, folder: Path, package: Path = ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "PYTHONPATH": f"{package}:{package / 'tests'}:{package / 'tests' / 'sharding'}"
    }
    return run_script(["-c", code], folder, environment, timeout=300)


def test_the_code_runs_on_public_names(tmp_path):
    """One after the other in one process: later examples use what earlier ones define."""
    code = "\n".join(EXAMPLES)
    imported = [
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom | ast.Import)
    ]
    modules = set()
    for node in imported:
        modules.add(getattr(node, "module", None) or node.names[0].name)
    assert "alpa_strategy" in modules
    assert not any(module.startswith("alpa_strategy.") for module in modules)
    result = run(code, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def changed(tmp_path_factory):
    """A copy of the checkout with the diffs applied."""
    folder = tmp_path_factory.mktemp("changed")
    for name in ("alpa_strategy", "configs", "tests/sharding"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in DIFFS:
        result = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            cwd=folder,
            input=diff,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
    return folder


# What the diffs of a rule, a schedule and a cluster promise.
CHECKS = """
import torch
from alpa_strategy import prove_sharding
from rule_cases import CASES
x, y = torch.randn(4, requires_grad=True), torch.randn(6, requires_grad=True)
assert "S0,R*->S0" in prove_sharding("aten::ger", [x, y])
assert "ger" in CASES

from alpa_strategy import PlanOptions
from alpa_strategy.schedules import in_flight, splits_backward, timeline
assert PlanOptions.from_user(schedule="InPairs").schedule == "InPairs"
assert in_flight("InPairs", 2, 6) == (2, 2)
assert not splits_backward("InPairs", 2, 6)
assert timeline("InPairs", [1.0, 1.0], [2.0, 2.0], 4)

from alpa_strategy import ClusterSpec
cluster = ClusterSpec.load("dgx_a100")
assert cluster.num_devices == 128
assert cluster.logical_mesh((128,)).axes[0].seconds("all_reduce", 2**20) > 0
"""


def test_the_diffs_do_what_they_say(changed, tmp_path):
    result = run(CHECKS, tmp_path, changed)
    assert result.returncode == 0, result.stderr
