#!/usr/bin/env bash
# Sets everything up, then lints, checks contracts, types and layout, and runs all tests but the slow ones, two files at a time.
# Arguments are passed on to pytest (`-n 0`: one after the other). scripts/test_quick.sh is the first thing to run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu
# Workers and ranks import the same tests many times; compiled, they are collected in half of the time.
unset PYTHONDONTWRITEBYTECODE
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/lint-imports
.venv/bin/mypy
.venv/bin/python scripts/check_structure.py
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=50 --durations-min=5 "$@"
