"""A short run of the fuzzer: the reader of every format refuses what is damaged, in its own words
and in time.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_damaged_files_are_refused():
    command = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), "--cases", "300", "--seed", "77"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert "300 passed, 0 failed" in done.stdout
