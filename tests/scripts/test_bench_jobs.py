"""What benchmarks do before they start processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from bench_jobs import compile_package

compile_package(Path(sys.argv[2]))
"""


def test_the_package_is_compiled_even_where_imports_write_no_bytecode(tmp_path: Path) -> None:
    package = tmp_path / "alpa_strategy"
    package.mkdir()
    (package / "part.py").write_text("x = 1\n")
    command = [sys.executable, "-B", "-c", PROGRAM, str(ROOT / "scripts"), str(tmp_path)]
    subprocess.run(command, check=True)
    (bytecode,) = package.glob("__pycache__/*.pyc")
    assert bytecode.name.startswith("part.")
