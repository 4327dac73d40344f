"""Where the strategy cannot be used, one message says so and what to do: Fabric, and the Trainer of
the package `pytorch_lightning` (a stand-in with its constructor), however these meet the strategy.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric
from template import run_script

from alpa_strategy import AlpaError, AlpaStrategy

# The constructor of the package's own Trainer, and what it says of strategies that it does not
# know.
STAND_IN = """
class Strategy: ...
class LightningModule: ...
class Trainer:
    def __init__(self, *, accelerator="auto", strategy="auto", devices="auto", **others):
        if strategy not in ("auto", "ddp") and not isinstance(strategy, Strategy):
            raise ValueError(f"You selected an invalid strategy name: `strategy={strategy!r}`.")
        self.strategy = strategy
"""
FABRICS = {
    "name": lambda: Fabric(strategy="alpa", accelerator="cpu", devices=1),
    "name in capitals": lambda: Fabric(strategy="Alpa", accelerator="cpu", devices=1),
    "strategy": lambda: Fabric(strategy=AlpaStrategy(), accelerator="cpu", devices=1),
    "strategy with options": lambda: Fabric(strategy=AlpaStrategy(parallel="zero3")),
    "two devices": lambda: Fabric(strategy=AlpaStrategy(), accelerator="cpu", devices=2),
    "subclass": lambda: type("Own", (Fabric,), {})(strategy=AlpaStrategy(), accelerator="cpu"),
}


@pytest.mark.parametrize("make", FABRICS.values(), ids=FABRICS)
def test_fabric_says_that_it_has_no_step(make):
    with pytest.raises(AlpaError, match="put the step into a LightningModule"):
        make()


def test_other_strategies_of_fabric_are_as_before():
    assert Fabric(accelerator="cpu", devices=1, strategy="auto").world_size == 1
    with pytest.raises(TypeError, match="nonsense"):
        Fabric(nonsense=3)


PROGRAMS = {
    "name": 'import alpa_strategy\nimport pytorch_lightning as pl\npl.Trainer(strategy="alpa")',
    "imported first": (
        'import pytorch_lightning as pl\nimport alpa_strategy\npl.Trainer(strategy="alpa")'
    ),
    "strategy": (
        "import alpa_strategy\nimport pytorch_lightning as pl\n"
        "pl.Trainer(strategy=alpa_strategy.AlpaStrategy())"
    ),
    "from import": (
        "from alpa_strategy import AlpaStrategy\nfrom pytorch_lightning import Trainer\n"
        "Trainer(strategy=AlpaStrategy(verbose=False), devices=2)"
    ),
    "subclass": (
        "import alpa_strategy\nimport pytorch_lightning as pl\n"
        'class Own(pl.Trainer): ...\nOwn(strategy="alpa")'
    ),
}


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    package = folder / "pytorch_lightning"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    paths = [str(folder), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return run_script(["-c", program], folder, environment)


# Each is a process of its own. By default both orders of the imports are tried.
DEFAULT_PROGRAMS = ("name", "imported first")


def programs() -> list[Any]:
    parameters = []
    for name, program in PROGRAMS.items():
        marks = () if name in DEFAULT_PROGRAMS else pytest.mark.slow
        parameters.append(pytest.param(program, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize("program", programs())
def test_pytorch_lightning_names_the_import_to_write(tmp_path: Path, program: str):
    done = run(tmp_path, program)
    assert done.returncode == 1
    assert "write `import lightning.pytorch as pl`" in done.stderr
    assert "invalid strategy name" not in done.stderr


def test_other_strategies_of_pytorch_lightning_are_as_before(tmp_path: Path):
    program = (
        "import alpa_strategy\nimport pytorch_lightning as pl\n"
        'assert pl.Trainer(strategy="ddp").strategy == "ddp"\nassert pl.Trainer()\n'
        'pl.Trainer(strategy="nonsense")'
    )
    done = run(tmp_path, program)
    assert "ValueError: You selected an invalid strategy name" in done.stderr
