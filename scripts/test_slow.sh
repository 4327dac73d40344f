#!/usr/bin/env bash
# Sets everything up and runs the tests that take minutes. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" DS_ACCELERATOR=cpu
exec .venv/bin/python -m pytest -m slow "$@"
