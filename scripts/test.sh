#!/usr/bin/env bash
# Sets everything up, then lints and runs the tests, two files at a time. Arguments are passed on to pytest (`-n 0`: one
# after the other).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu
.venv/bin/ruff check .
.venv/bin/ruff format --check .
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"
