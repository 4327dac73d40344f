"""What the package requires is what its specification names, and it imports no other solver."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = {"torch", "lightning", "ortools", "numpy", "omegaconf", "rich"}


def test_named_packages_are_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w.-]+", text)[0] for text in project["dependencies"]}
    assert required - {"psutil"} == NAMED
    assert "deepspeed" in project["optional-dependencies"]


def test_programs_are_solved_by_ortools_alone():
    users = {"ortools": set(), "highspy": set()}
    for path in (ROOT / "alpa_strategy").rglob("*.py"):
        for name, files in users.items():
            if re.search(rf"^\s*(import|from) {name}\b", path.read_text(), re.MULTILINE):
                files.add(path.relative_to(ROOT / "alpa_strategy").as_posix())
    solved_in = {"intra_op/solver/mathopt.py", "inter_op/split_bound.py"}
    assert users == {"ortools": solved_in, "highspy": set()}
