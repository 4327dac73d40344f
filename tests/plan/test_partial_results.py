"""Partial results: equal to the last bit, found by content alone, and never trusted."""

import json
import os
import time

import numpy as np
import pytest

from alpa_strategy import partial_results
from alpa_strategy.errors import DoesNotFitError, PlanError
from alpa_strategy.intra_op.problem import Choice, Problem
from alpa_strategy.intra_op.solver.solve import NoCheaperSolution, solve
from alpa_strategy.intra_op.solver.stored import problem_key, solve_stored
from alpa_strategy.partial_results import Key, PartialResults

ARRAYS = {
    "floats": np.array([[0.1, np.inf], [-np.inf, 1e-310]]),
    "whole": np.array([1, -2, 1 << 40]),
    "flags": np.array([[True], [False]]),
    "none": np.zeros((0, 3)),
}


@pytest.fixture(autouse=True)
def everything_is_stored(monkeypatch):
    monkeypatch.setattr(partial_results, "LEAST_SECONDS", 0.0)


def computed(results, record=ARRAYS, key="k", raises=None):
    """Whether `get` computed a result, and what it gave."""
    calls = []

    def compute():
        calls.append(1)
        if raises is not None:
            raise raises
        return record

    got = results.get("thing", lambda: Key(key), compute, dict, dict)
    return bool(calls), got


def the_file(folder):
    (path,) = folder.iterdir()
    return path


def test_what_is_read_is_what_was_stored_to_the_last_bit(tmp_path):
    computed(PartialResults(tmp_path), {**ARRAYS, "text": "a", "rows": [[1, 0.1]]})
    was_computed, again = computed(PartialResults(tmp_path))
    assert not was_computed
    assert again.pop("text") == "a"
    assert again.pop("rows") == [[1, 0.1]]
    for name, array in ARRAYS.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name].view(np.uint8), array.view(np.uint8))


def test_an_error_that_is_a_result_is_stored_and_others_are_not(tmp_path):
    for error in (DoesNotFitError("no room", "more"), PlanError("no way", "")):
        folder = tmp_path / type(error).__name__
        for _ in range(2):
            with pytest.raises(type(error), match=error.problem) as raised:
                computed(PartialResults(folder), raises=error)
            assert (type(raised.value), raised.value.fix) == (type(error), error.fix)
        assert len(list(folder.iterdir())) == 1
    with pytest.raises(KeyError):
        computed(PartialResults(tmp_path / "other"), raises=KeyError("a defect"))
    assert not (tmp_path / "other").exists()


DAMAGES = {
    "torn": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no JSON": lambda text: "\x00" * 10,
    "another list": lambda text: "[1, 2]",
    "a number": lambda text: "3",
    "older": lambda text: text.replace('"version": 2', '"version": 0'),
    "of another name": lambda text: text.replace("thing-", "other-"),
    "changed": lambda text: text.replace('"text": "a"', '"text": "b"'),
    "without seconds": lambda text: text.replace('"seconds"', '"minutes"'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_reported_and_computed_again(damage, tmp_path):
    computed(PartialResults(tmp_path), {**ARRAYS, "text": "a"})
    path, said = the_file(tmp_path), []
    path.write_text(DAMAGES[damage](path.read_text()))
    was_computed, _ = computed(PartialResults(tmp_path, said.append))
    assert was_computed
    (line,) = said
    assert path.name in line
    assert line.endswith("computed again")


@pytest.mark.parametrize(
    "array",
    [
        {"dtype": "<f8", "shape": [10**12], "zlib": ""},
        {"dtype": "<f8", "shape": [-1], "zlib": ""},
        {"dtype": "|O8", "shape": [1], "zlib": ""},
        {"dtype": "<f8", "shape": [1], "zlib": "é"},
        {"dtype": "<f8", "shape": [2], "zlib": "eJxjYAABAAAIAAE="},
    ],
)
def test_an_array_that_is_none_is_refused_whoever_made_its_checksum(array, tmp_path):
    computed(PartialResults(tmp_path))
    path, said = the_file(tmp_path), []
    content = json.loads(path.read_text())
    content["data"]["floats"] = array
    content["checksum"] = partial_results._checksum(content["data"])
    path.write_text(json.dumps(content))
    was_computed, _ = computed(PartialResults(tmp_path, said.append))
    assert was_computed
    assert len(said) == 1


def test_a_folder_that_cannot_be_written_costs_one_line(tmp_path):
    (tmp_path / "file").write_text("no folder")
    said = []
    results = PartialResults(tmp_path / "file" / "planning", said.append)
    for key in ("k", "l", "k"):
        assert computed(results, key=key)[0]
    (line,) = said
    assert "cannot be stored" in line
    results.done()
    assert (tmp_path / "file").read_text() == "no folder"


def test_only_used_files_are_deleted_at_the_end(tmp_path):
    folder = tmp_path / ".alpa" / "planning"
    computed(PartialResults(folder), key="of an interrupted one")
    computed(PartialResults(folder), key="of another planning")
    said = []
    with PartialResults(folder, said.append) as results:
        assert not computed(results, key="of an interrupted one")[0]
        assert computed(results, key="new")[0]
    assert len(list(folder.iterdir())) == 1
    assert "1 results of an interrupted planning were used" in said[-1]
    with PartialResults(folder) as results:
        assert not computed(results, key="of another planning")[0]
    assert not (tmp_path / ".alpa").exists()


def interrupted_by(error, folder):
    with PartialResults(folder) as results:
        computed(results)
        raise error


def test_what_is_no_error_for_users_leaves_the_files(tmp_path):
    for error, is_left in ((KeyboardInterrupt(), True), (PlanError("nothing fits"), False)):
        with pytest.raises(type(error)):
            interrupted_by(error, tmp_path / "planning")
        assert (tmp_path / "planning").exists() == is_left


def test_what_is_old_or_too_much_is_deleted(tmp_path, monkeypatch):
    for number in range(4):
        computed(PartialResults(tmp_path), key=str(number))
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    now = time.time()
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (now - age, now - age))
    os.utime(paths[0], (now - 8 * 24 * 3600,) * 2)
    (tmp_path / "of the user.json").write_text("{}")
    os.utime(tmp_path / "of the user.json", (0, 0))
    PartialResults(tmp_path)
    assert not paths[0].exists()
    assert all(path.exists() for path in paths[1:])

    newest_two = sum(path.stat().st_size for path in paths[2:])
    monkeypatch.setattr(partial_results, "MAX_FOLDER_BYTES", newest_two + 1)
    PartialResults(tmp_path)
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert (tmp_path / "of the user.json").exists()


# --- Solutions: found by the whole problem, and evaluated again.


def problem(cost=(1.0, 2.0), memory=(5.0, 1.0), limit=np.inf):
    return Problem((Choice("op", np.array(cost), np.array(memory)),), (), limit)


def test_a_solution_is_found_by_all_that_it_depends_on():
    keys = {
        problem_key(problem()).text,
        problem_key(problem(cost=(1.0, 2.0 + 1e-15))).text,
        problem_key(problem(memory=(5.0, 1.5))).text,
        problem_key(problem(limit=3.0)).text,
        problem_key(problem(), 60.0).text,
        problem_key(problem(), 60.0, 1.0).text,
    }
    assert len(keys) == 6
    assert problem_key(problem()).text == problem_key(problem()).text


def test_stored_solutions_are_those_of_the_solver(tmp_path):
    for limit in (np.inf, 3.0):
        first = solve_stored(PartialResults(tmp_path), problem(limit=limit))
        results = PartialResults(tmp_path)
        assert solve_stored(results, problem(limit=limit)) == first == solve(problem(limit=limit))
        assert results.num_used == 1
    for _ in range(2):
        with pytest.raises(NoCheaperSolution):
            solve_stored(PartialResults(tmp_path), problem(), cutoff=0.5)
        with pytest.raises(DoesNotFitError, match="the least is"):
            solve_stored(PartialResults(tmp_path), problem(limit=0.5))
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("assignment", "numbers"),
    [([1], [1.0, 5.0, 1.0]), ([2], [1.0, 5.0, 1.0]), ([-1], [2.0, 1.0, 2.0]), ([0, 0], [1.0] * 3)],
)
def test_a_solution_that_is_none_is_not_believed(assignment, numbers, tmp_path):
    right = solve_stored(PartialResults(tmp_path), problem())
    path, said = the_file(tmp_path), []
    content = json.loads(path.read_text())
    forged = {"assignment": np.array(assignment), "numbers": np.array(numbers)}
    content["data"] |= {name: partial_results._encoded(array) for name, array in forged.items()}
    content["checksum"] = partial_results._checksum(content["data"])
    path.write_text(json.dumps(content))
    assert solve_stored(PartialResults(tmp_path, said.append), problem()) == right
    assert len(said) == 1
