#!/usr/bin/env bash
# Sets everything up and trains a small GPT on two CPU ranks, printing the plan. Arguments are passed on as overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/alpa train recipes/gpt_tiny.yaml trainer.devices=2 "$@"
