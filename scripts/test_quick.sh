#!/usr/bin/env bash
# Sets everything up, lints and runs the tests that need one process and no more than about a second each: planning,
# rules, capture, files. Under 90 seconds on two cores. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist loadfile -m quick "$@"
