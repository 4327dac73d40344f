#!/usr/bin/env bash
# Makes .venv with everything that the project needs; quick when that is done already. PYTHON chooses the interpreter.
# Where `nvidia-smi` finds a GPU the CUDA build of PyTorch is installed, else the far smaller CPU build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

compile_package() {
    # Tests and commands import the package hundreds of times. Where PYTHONDONTWRITEBYTECODE is set, every process would
    # compile it anew: half of the CPU time of its imports.
    .venv/bin/python -m compileall -q alpa_strategy
}

stamp=.venv/.ready-for
wanted="$(sha256sum pyproject.toml setup.py scripts/setup.sh | sha256sum | cut -d' ' -f1)"
if [[ -x .venv/bin/alpa && -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    compile_package
    exit 0
fi

python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup: Python 3.11 or newer is needed; $("$python" --version) was found. Set PYTHON=/path/to/python3.11" >&2
    exit 1
}
echo "setup: installing into .venv (a few minutes the first time)" >&2
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install -qq --disable-pip-version-check --retries 1)
index=(--extra-index-url https://download.pytorch.org/whl/cpu)  # there 2.13.0+cpu, which pip takes before 2.13.0
nvidia-smi >/dev/null 2>&1 && index=()
"${pip[@]}" --no-deps "torch==2.13.0" "${index[@]}"
"${pip[@]}" -e ".[deepspeed,dev,recipes]"
compile_package
echo "$wanted" >"$stamp"
