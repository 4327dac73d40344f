"""The package as a user installs it: a wheel in an environment of its own, no checkout in addition,
an empty folder.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = ("alpa", "__editable__", "deepspeed", "_alpa")

pytestmark = pytest.mark.slow


def run(*command, cwd, seconds=300, **changes):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "DS_ACCELERATOR")
    } | changes
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of executables of an environment with the wheel, and without deepspeed."""
    folder = tmp_path_factory.mktemp("install")
    source, heavy = folder / "source", folder / "heavy"
    source.mkdir()
    heavy.mkdir()
    for name in (
        "alpa_strategy",
        "recipes",
        "configs",
        "docs",
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
    ):
        run("cp", "-r", ROOT / name, source, cwd=ROOT)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source, cwd=folder)
    run("rm", "-r", source, cwd=folder)
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    # PyTorch and the like are linked instead of downloaded again: all but this package and what it
    # does not need.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(LEFT_OUT) and entry.suffix != ".pth":
            (heavy / entry.name).symlink_to(entry)
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("env/lib/python*/site-packages")
    (site / "heavy.pth").write_text(f"{heavy}\n")
    return python.parent


def test_clusters_and_the_license_are_in_the_wheel(installed, tmp_path):
    code = (
        "import alpa_strategy as a; print(a.ClusterSpec.load('dgx_h100').num_devices, a.__file__)"
    )
    devices, file = run(installed / "python", "-c", code, cwd=tmp_path).split()
    assert int(devices) == 128
    assert Path(file).is_relative_to(installed.parent)
    assert list(
        installed.parent.glob(
            "lib/python*/site-packages/alpa_strategy-*.dist-info/licenses/LICENSE"
        )
    )


def test_the_version_and_the_marker_of_types_are_in_the_wheel(installed, tmp_path):
    code = (
        "import alpa_strategy as a, importlib.metadata as m, importlib.resources as r;"
        "marker = r.files(a).joinpath('py.typed');"
        "print(a.__version__ == m.version('alpa-strategy'), marker.is_file())"
    )
    assert run(installed / "python", "-c", code, cwd=tmp_path).split() == ["True", "True"]


def test_the_wheel_requires_ortools_and_no_other_solver(installed, tmp_path):
    code = (
        "import importlib.metadata as m;"
        "print([r for r in m.requires('alpa-strategy') if r.startswith(('ortools', 'highspy'))])"
    )
    shown = run(installed / "python", "-c", code, cwd=tmp_path)
    assert "ortools" in shown
    assert "highspy" not in shown


def test_the_findings_on_ops_are_in_the_wheel(installed, tmp_path):
    shown = run(installed / "alpa", "ops", "aten.mm.default", "--json", cwd=tmp_path)
    assert '"proved": true' in shown
    (docs,) = installed.parent.glob("lib/python*/site-packages/alpa_strategy/docs")
    assert [path.name for path in docs.iterdir()] == ["op_coverage.json"]


def test_plan_by_name_from_an_empty_folder(installed, tmp_path):
    shown = run(
        installed / "alpa",
        "plan",
        "gpt_1_3b",
        "--cluster",
        "dgx_h100",
        "-o",
        "plan.json",
        cwd=tmp_path,
    )
    assert "128 devices on dgx_h100" in shown
    assert (tmp_path / "plan.json").is_file()


def test_train_by_name_from_an_empty_folder(installed, tmp_path):
    command = ("train", "gpt_tiny", "trainer.devices=2", "trainer.max_steps=4")
    shown = run(installed / "alpa", *command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "trained 4 steps" in shown


def test_asking_for_deepspeed_says_how_to_install_it(installed, tmp_path):
    code = "\n".join(
        [
            "from alpa_strategy.comm.mesh import select_backend",
            "print(select_backend('auto').__name__)",
            "select_backend('deepspeed')",
        ]
    )
    result = subprocess.run(
        [installed / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, env={}
    )
    assert result.stdout.strip() == "torch.distributed"
    assert "pip install deepspeed, or leave backend" in result.stderr
