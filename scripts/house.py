#!/usr/bin/env python
"""The figures of the house, and its rules beside pyproject.toml's contracts of who imports whom.

    python scripts/house.py [FOLDER OF THE PACKAGE]

Prints lines, files and comments room by room, then what breaks a rule; exit code 1 where something
does.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "alpa_strategy"

MAX_FILE_LINES = 600
MIN_COMMENT_SHARE = 0.03
# Files that passed the limit when lines became 100 columns wide. Each is several ideas and will be
# several files; none is added here.
TO_BE_SPLIT = {
    "cluster/spec.py",
    "cost/model.py",
    "inter_op/candidates.py",
    "ir/plan.py",
    "lightning/batch_rows.py",
    "lower/codegen.py",
    "planner/search.py",
    "runtime/parameters.py",
    "sharding/notation_rules.py",
}

# Imports inside functions, and why: packages that are slow to import or may be missing, and the
# files that wait.
LAZY_PACKAGES = {
    "deepspeed": "an extra; its import takes a second",
    "omegaconf": "75 modules, and only where a YAML file is read",
    "ortools": "0.1 to 0.3 s, and only where a plan needs the solver's proof",
    "pybind11_abseil": "comes with ortools",
    "torch._dynamo": "a second, and only where the step uses torch.compile",
    "torch._inductor": "loads torch._dynamo",
    "transformers": "seconds, and only where a model comes from there",
}
_FIRST_STEP = "import alpa_strategy registers the strategy: what steps need comes with the first"
LAZY_FILES = {
    "__init__.py": "its names are loaded at their first use",
    "lightning/batch_rows.py": _FIRST_STEP,
    "lightning/job.py": _FIRST_STEP,
    "lightning/step_effects.py": _FIRST_STEP,
    "cli.py": "each subcommand imports the rooms that `import alpa_strategy` leaves out",
    "lightning/session.py": "import alpa_strategy registers the strategy: a training's rooms come with its first batch",
}
# Who makes process groups and meshes of them: every other room is given them.
GROUP_MAKERS = {
    "new_group",
    "init_process_group",
    "init_device_mesh",
    "DeviceMesh",
    "new_subgroups",
    "split_group",
}
GROUP_ROOM = "comm"


@dataclass(frozen=True)
class SourceFile:
    """One file of the package, counted. `name` is its path in the package."""

    name: str
    tree: ast.Module
    num_lines: int
    num_comments: int  # lines with a comment, alone or after code

    @property
    def room(self) -> str:
        return self.name.partition("/")[0] if "/" in self.name else "(top)"


def read_package(package: Path = PACKAGE) -> list[SourceFile]:
    """Every Python file of the package, in order of its name."""
    files = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        name = path.relative_to(package).as_posix()
        files.append(SourceFile(name, ast.parse(text), text.count("\n"), len(comments)))
    return files


def broken_sizes(files: list[SourceFile]) -> Iterator[str]:
    """A sentence for every limit that is passed."""
    num_lines = sum(file.num_lines for file in files)
    num_comments = sum(file.num_comments for file in files)
    if num_comments < MIN_COMMENT_SHARE * num_lines:
        share = num_comments / num_lines
        yield f"{num_comments} lines have comments, {share:.1%}, fewer than {MIN_COMMENT_SHARE:.0%}"
    for file in files:
        if file.num_lines > MAX_FILE_LINES and file.name not in TO_BE_SPLIT:
            yield f"{file.name}: {file.num_lines} lines, more than {MAX_FILE_LINES}"


def broken_rules(files: list[SourceFile]) -> Iterator[str]:
    """A sentence for every rule that the code does not keep."""
    for file in files:
        for line, module in dict.fromkeys(hidden_imports(file)):  # once for nested functions
            yield f"{file.name}:{line}: imports {module} inside a function (no reason is listed in scripts/house.py)"
        if file.room != GROUP_ROOM:
            for line, name in calls(file.tree, GROUP_MAKERS):
                yield f"{file.name}:{line}: calls {name}; process groups are made in {GROUP_ROOM}/ alone"


def hidden_imports(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, module) of imports inside functions that have no listed reason."""
    if file.name in LAZY_FILES:
        return
    for function in ast.walk(file.tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = ["." * node.level + (node.module or "")]
            else:
                continue
            for module in modules:
                if not any(f"{module}.".startswith(f"{package}.") for package in LAZY_PACKAGES):
                    yield node.lineno, module


def calls(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of calls of functions with one of `names`, whatever they are an attribute of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if name in names:
                yield node.lineno, name


def figures(files: list[SourceFile]) -> Iterator[str]:
    """A table: a line a room, then all of them."""
    rooms: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        rooms[file.room].append(file)
    yield f"{'room':<12} {'files':>5} {'lines':>6} {'longest':>7} {'comments':>8}"
    for room, members in [*sorted(rooms.items()), ("all", files)]:
        lines, comments = sum(f.num_lines for f in members), sum(f.num_comments for f in members)
        longest = max(f.num_lines for f in members)
        yield f"{room:<12} {len(members):>5} {lines:>6} {longest:>7} {comments / max(1, lines):>8.1%}"


def main() -> int:
    """The figures, then what is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "package", nargs="?", type=Path, default=PACKAGE, help="folder of the package"
    )
    package = parser.parse_args().package
    if not (files := read_package(package)):
        parser.error(f"{package} has no Python files")
    print(*figures(files), sep="\n")
    broken = [*broken_sizes(files), *broken_rules(files)]
    print(*(f"broken: {text}" for text in broken), sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
