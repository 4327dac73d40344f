#!/usr/bin/env bash
# Builds the site of docs/ into build/site, in an environment of its own (build/docs-env); a warning is an error.
# Arguments are passed on to `mkdocs build`. MKDOCS names an installed mkdocs to use instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ -z "${MKDOCS:-}" ]]; then
    environment=build/docs-env
    stamp=$environment/.ready-for
    wanted="$(sha256sum pyproject.toml | cut -d' ' -f1)"
    if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
        "${PYTHON:-python3}" -m venv "$environment"
        # Only the packages of the extra `docs`: the pages are made from sources, nothing is imported.
        mapfile -t packages < <("$environment/bin/python" -c 'import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["docs"], sep="\n")')
        "$environment/bin/python" -m pip install -qq --disable-pip-version-check "${packages[@]}"
        echo "$wanted" >"$stamp"
    fi
    MKDOCS=$environment/bin/mkdocs
fi

# From standard input, so that paths in it begin at the repository's root.
NO_MKDOCS_2_WARNING=1 "$MKDOCS" build --strict --clean -f - "$@" <docs/mkdocs.yml
