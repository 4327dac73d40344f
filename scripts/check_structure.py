#!/usr/bin/env python
"""Checks how the code is laid out: what ruff, mypy and the import contracts cannot see.

    python scripts/check_structure.py [FOLDER OF THE PACKAGE]

Prints the figures of every folder, then every place that breaks a rule. The exit code is 1 if a
rule has more such places than `BUDGETS` allows. A budget may shrink and never grows.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "alpa_strategy"
CODE_FOLDERS = ("alpa_strategy", "recipes", "scripts", "tests")
DOCS = ("README.md", "CONTRIBUTING.md", "docs/*.md")

MAX_LINE_LENGTH = 100
MAX_DOCS_LINE_LENGTH = 120
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_DENSE_SHARE = 0.005
MIN_COMMENT_SHARE = 0.03

# How many places may break each rule, all code folders together, while the code is rewritten.
BUDGETS: dict[str, int] = {
    "dense": 0,
    "long-docs-line": 0,
    "long-file": 0,
    "long-function": 0,
    "long-line": 0,
    "nested-comprehension": 0,
    "phrase": 0,
    "ternary-in-comprehension": 0,
    "tuple-assignment": 1,
    "vague-name": 0,
    "vague-name-outside": 498,
}

# Imports inside functions, and why: packages that are slow to import or may be missing, and the
# files that wait.
LAZY_PACKAGES = {
    "alpa_strategy.hf": "only where a model of Hugging Face is loaded or saved",
    "deepspeed": "an extra; its import takes a second",
    "omegaconf": "75 modules, and only where a YAML file is read",
    "ortools": "0.1 to 0.3 s, and only where a plan needs the solver's proof",
    "pybind11_abseil": "comes with ortools",
    "torch._dynamo": "a second, and only where the step uses torch.compile",
    "torch._inductor": "loads torch._dynamo",
    "transformers": "seconds, and only where a model comes from there",
}
_FIRST_STEP = "import alpa_strategy registers the strategy: what steps need comes with the first"
_NO_PLANNER = "the planner is imported where a command plans, not for `alpa show`"
LAZY_FILES = {
    "__init__.py": "its names are loaded at their first use",
    "cli.py": "each subcommand imports the folders that `import alpa_strategy` leaves out",
    "commands/origin.py": _NO_PLANNER,
    "commands/plan.py": _NO_PLANNER,
    "commands/recipe_task.py": _NO_PLANNER,
    "commands/whatif.py": _NO_PLANNER,
    "commands/why.py": _NO_PLANNER,
    "extras/__init__.py": "each extra is imported at its first use",
    "extras/planned_submodules/hook.py": _FIRST_STEP,
    "fit/command.py": _NO_PLANNER,
    "lightning/job.py": _FIRST_STEP,
    "lightning/logger_report.py": "a page is drawn only for loggers that store files",
    "lightning/plan_pages.py": "a page is drawn by one rank, after the first steps",
    "lightning/host_costs.py": "the planner is imported where a plan is made",
    "lightning/planning.py": "the planner is imported where a plan is made, not for a stored one",
    "lightning/session.py": _FIRST_STEP,
    "lightning/step_effects.py": _FIRST_STEP,
    "lightning/step_reports.py": "steps are profiled for those alone who want it",
}
# Who makes process groups and meshes of them: every other folder is passed them.
GROUP_MAKERS = {
    "DeviceMesh",
    "init_device_mesh",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "split_group",
}
GROUP_FOLDER = "comm"

# Folders that plan, offline as well: one file there knows torch.distributed. All may name
# placements.
PLANNING_FOLDERS = {
    "capture",
    "cluster",
    "cost",
    "inter_op",
    "intra_op",
    "ir",
    "microbatch",
    "planner",
    "sharding",
}
DISTRIBUTED_FILE = "capture/communication.py"
PLACEMENTS = "torch.distributed.tensor.placement_types"

# Phrases that only this project used, and what PyTorch's documentation calls them.
PHRASES = {
    r"as (?:it|they) (?:is|are) written|as written|written run": "eager, uncaptured",
    r"made again|runs? again": "recomputed",
    r"(?:gathered|brought) again": "re-gathered",
    r"in parts": "sharded, chunked",
    r"summands?": "partial value",
    r"under way|on its way": "in flight",
    r"short-lived": "temporary",
    r"the house": "the codebase",
    r"thrift": "memory-saving",
    r"so many": "`n`",
    r"nobody|somebody": "users, no consumer",
}

# Names of variables, arguments, attributes and functions that say nothing: name what was found.
VAGUE_NAMES = {"each", "found", "given", "kept", "made", "own", "said", "what", "whole"}

# Files that have the phrases to look for them.
QUOTE_PHRASES = {"scripts/check_structure.py", "tests/structure/test_structure.py"}

# (file, phrase) of values in plan files, which older versions wrote as well.
FILE_VALUES = {("alpa_strategy/ir/plan.py", "as written")}

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DENSE_KINDS = (*COMPREHENSIONS, ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Lambda)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPOUND = (
    *FUNCTIONS,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)


@dataclass(frozen=True)
class Violation:
    """A place that breaks a rule. `path` is relative to the checked folder."""

    rule: str
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message} [{self.rule}]"


@dataclass(frozen=True)
class SourceFile:
    """One Python file. `path` is relative to the folder that was read."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def comments(self) -> list[tokenize.TokenInfo]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [token for token in tokens if token.type == tokenize.COMMENT]

    @property
    def folder(self) -> str:
        """The package's folder that the file is in, `(top)` for files beside them."""
        first, separator, _ = self.path.partition("/")
        return first if separator else "(top)"

    @cached_property
    def simple_statements(self) -> list[ast.stmt]:
        """Statements without a body."""
        statements = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt) and not isinstance(node, COMPOUND):
                statements.append(node)
        return statements


def read_folder(folder: Path) -> list[SourceFile]:
    """Every Python file below `folder`, in order of its path."""
    files = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder).as_posix()
        files.append(SourceFile(relative, path.read_text(encoding="utf-8")))
    return files


# Rules of layout, for every code folder


def layout_violations(file: SourceFile) -> Iterator[Violation]:
    """Long lines, files and functions, and statements that pack too much."""
    yield from _long(file)
    for statement in file.simple_statements:
        if is_dense(statement):
            message = "packs two or more of comprehension, ternary, and/or, walrus, lambda"
            yield Violation("dense", file.path, statement.lineno, message)
        if _assigns_unrelated_values(statement):
            message = "assigns three or more unrelated values in one statement"
            yield Violation("tuple-assignment", file.path, statement.lineno, message)
    for node in ast.walk(file.tree):
        if not isinstance(node, COMPREHENSIONS):
            continue
        inner = [child for child in ast.walk(node) if child is not node]
        if any(isinstance(child, ast.IfExp) for child in inner):
            message = "a ternary inside a comprehension"
            yield Violation("ternary-in-comprehension", file.path, node.lineno, message)
        on_one_line = node.lineno == node.end_lineno
        if on_one_line and any(isinstance(child, COMPREHENSIONS) for child in inner):
            message = "a comprehension inside another on one line"
            yield Violation("nested-comprehension", file.path, node.lineno, message)


def is_dense(statement: ast.stmt) -> bool:
    """Whether a one-line statement has two or more constructs that a reader has to take apart."""
    if statement.lineno != statement.end_lineno:
        return False
    constructs = [node for node in ast.walk(statement) if isinstance(node, DENSE_KINDS)]
    return len(constructs) >= 2


def _long(file: SourceFile) -> Iterator[Violation]:
    for number, line in enumerate(file.lines, start=1):
        if len(line) > MAX_LINE_LENGTH:
            message = f"{len(line)} columns, more than {MAX_LINE_LENGTH}"
            yield Violation("long-line", file.path, number, message)
    if len(file.lines) > MAX_FILE_LINES:
        message = f"{len(file.lines)} lines, more than {MAX_FILE_LINES}"
        yield Violation("long-file", file.path, 1, message)
    for node in ast.walk(file.tree):
        if not isinstance(node, FUNCTIONS):
            continue
        assert node.end_lineno is not None
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES:
            message = f"{node.name} has {num_lines} lines, more than {MAX_FUNCTION_LINES}"
            yield Violation("long-function", file.path, node.lineno, message)


def _assigns_unrelated_values(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Tuple):
        return False
    targets = statement.targets[0]
    return isinstance(targets, ast.Tuple) and len(targets.elts) >= 3


def vague_name_violations(file: SourceFile) -> Iterator[Violation]:
    """Definitions with a name of `VAGUE_NAMES`; outside the package they are another rule."""
    is_in_package = file.path.startswith(f"{PACKAGE.name}/")
    rule = "vague-name" if is_in_package else "vague-name-outside"
    for node in ast.walk(file.tree):
        name = defined_name(node)
        if name in VAGUE_NAMES:
            message = f"{name!r} says nothing: name what it is"
            yield Violation(rule, file.path, getattr(node, "lineno", 1), message)


def defined_name(node: ast.AST) -> str | None:
    """Name that a node gives to a variable, argument, attribute, function or class; else None."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return node.name
    return None


def phrase_violations(path: str, number: int, text: str) -> Iterator[Violation]:
    """Phrases of `PHRASES` in one line of prose."""
    for pattern, better in PHRASES.items():
        match = re.search(rf"\b(?:{pattern})\b", text, re.IGNORECASE)
        if match:
            message = f"{match.group()!r}: write {better}"
            yield Violation("phrase", path, number, message)


def prose_of(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and strings, docstrings and error messages among them."""
    for comment in file.comments:
        yield comment.start[0], comment.string
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def docs_violations(root: Path) -> Iterator[Violation]:
    """Long lines and phrases of the Markdown files. Tables and code are not prose."""
    for pattern in DOCS:
        for path in sorted(root.glob(pattern)):
            yield from _docs_file_violations(path.relative_to(root).as_posix(), path.read_text())


def _docs_file_violations(path: str, text: str) -> Iterator[Violation]:
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if in_code:
            continue
        is_table = line.lstrip().startswith("|")
        if len(line) > MAX_DOCS_LINE_LENGTH and not is_table:
            message = f"{len(line)} columns, more than {MAX_DOCS_LINE_LENGTH}"
            yield Violation("long-docs-line", path, number, message)
        yield from phrase_violations(path, number, line)


# Rules of structure, for the package alone


def structure_violations(file: SourceFile) -> Iterator[Violation]:
    """Imports inside functions without a listed reason, imports of torch.distributed in planning,
    process groups made outside `comm/`.
    """
    # Once for nested functions, which are walked with their parents as well.
    for line, module in dict.fromkeys(hidden_imports(file)):
        message = (
            f"imports {module} inside a function (no reason is listed in {Path(__file__).name})"
        )
        yield Violation("hidden-import", file.path, line, message)
    for line in distributed_imports(file):
        message = f"imports torch.distributed; of planning, {DISTRIBUTED_FILE} alone does"
        yield Violation("planning-distributed", file.path, line, message)
    if file.folder == GROUP_FOLDER:
        return
    for line, name in calls(file.tree, GROUP_MAKERS):
        message = f"calls {name}; process groups are made in {GROUP_FOLDER}/ alone"
        yield Violation("process-group", file.path, line, message)


def distributed_imports(file: SourceFile) -> Iterator[int]:
    """Lines on which a file of planning imports torch.distributed."""
    if file.folder not in PLANNING_FOLDERS or file.path == DISTRIBUTED_FILE:
        return
    for node in ast.walk(file.tree):
        modules = _imported_modules(node)
        if modules == ["torch"] and isinstance(node, ast.ImportFrom):
            modules = [f"torch.{alias.name}" for alias in node.names]
        for module in modules:
            if module.startswith("torch.distributed") and module != PLACEMENTS:
                yield node.lineno


def hidden_imports(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, module) of imports inside functions that have no listed reason."""
    if file.path in LAZY_FILES:
        return
    for function in ast.walk(file.tree):
        if not isinstance(function, FUNCTIONS):
            continue
        for node in ast.walk(function):
            for module in _imported_modules(node):
                if not _is_lazy(module):
                    yield node.lineno, module


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    return []


def _is_lazy(module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in LAZY_PACKAGES)


def calls(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of calls of functions with one of `names`, whatever they are an attribute of."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute):
            name = node.func.attr
        else:
            name = getattr(node.func, "id", "")
        if name in names:
            yield node.lineno, name


# Figures and the command


def figures(files: list[SourceFile]) -> Iterator[str]:
    """A table: a line for every folder, then for all of them together."""
    folders: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        folders[file.folder].append(file)
    yield (
        f"{'folder':<12} {'files':>5} {'lines':>6} {'longest':>7} {'dense':>7}"
        f" {'own-line comments':>17}"
    )
    for folder, members in [*sorted(folders.items()), ("all", files)]:
        longest = max(len(file.lines) for file in members)
        num_lines = sum(len(file.lines) for file in members)
        yield (
            f"{folder:<12} {len(members):>5} {num_lines:>6} {longest:>7}"
            f" {dense_share(members):>7.2%} {own_line_share(members):>17.0%}"
        )


def dense_share(files: Iterable[SourceFile]) -> float:
    """Share of simple statements that are dense."""
    statements = [statement for file in files for statement in file.simple_statements]
    num_dense = sum(is_dense(statement) for statement in statements)
    return num_dense / max(1, len(statements))


def own_line_share(files: Iterable[SourceFile]) -> float:
    """Share of comments that stand on a line of their own."""
    num_comments = 0
    num_own_line = 0
    for file in files:
        for comment in file.comments:
            num_comments += 1
            num_own_line += file.lines[comment.start[0] - 1].lstrip().startswith("#")
    return num_own_line / max(1, num_comments)


def comment_share(files: Iterable[SourceFile]) -> float:
    """Share of lines with a comment."""
    num_lines = sum(len(file.lines) for file in files)
    commented = {(file.path, comment.start[0]) for file in files for comment in file.comments}
    return len(commented) / max(1, num_lines)


def all_violations(root: Path = ROOT) -> list[Violation]:
    """Every place in the repository that breaks a rule."""
    violations = list(docs_violations(root))
    for name in CODE_FOLDERS:
        for file in read_folder(root / name):
            in_root = SourceFile(f"{name}/{file.path}", file.text)
            violations += layout_violations(in_root)
            violations += vague_name_violations(in_root)
            if in_root.path not in QUOTE_PHRASES:
                for number, text in prose_of(file):
                    if (in_root.path, text) not in FILE_VALUES:
                        violations += phrase_violations(in_root.path, number, text)
            if name == PACKAGE.name:
                violations += structure_violations(file)
    return violations


def over_budget(violations: Iterable[Violation]) -> list[str]:
    """A line for every rule that is broken in more places than its budget allows."""
    counts = Counter(violation.rule for violation in violations)
    lines = []
    for rule, count in sorted(counts.items()):
        budget = BUDGETS.get(rule, 0)
        if count > budget:
            lines.append(f"{rule}: {count} places, more than {budget}")
    return lines


def main() -> int:
    """Print the figures and what breaks a rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print every place")
    arguments = parser.parse_args()
    print(*figures(read_folder(PACKAGE)), sep="\n")
    violations = all_violations()
    for rule, count in Counter(violation.rule for violation in violations).most_common():
        print(f"{rule:<26} {count:>5} (budget {BUDGETS.get(rule, 0)})")
    if arguments.verbose:
        print(*violations, sep="\n")
    exceeded = over_budget(violations)
    print(*exceeded, sep="\n")
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
