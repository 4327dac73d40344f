#!/usr/bin/env bash
# Examines strategy="alpa" on one GPU (torch 2.11 or newer), in under nine minutes: one table, one JSON. Arguments are
# those of gpu_exam.py. PYTHON chooses the interpreter; nothing is installed: what the package needs must be there.
#   scripts/gpu_exam.sh --out gpu_exam.json
#   scripts/gpu_exam.sh --device cpu --small
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-}"
if [[ -z $python ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
exec "$python" scripts/gpu_exam.py "$@"
