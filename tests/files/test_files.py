"""Files that anybody may write: what is no file of ours is one sentence, no traceback; writing is
all or nothing.
"""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_strategy.files import BadFileError, parse_json, read_json, read_yaml, write_json

TEXT = st.text(st.characters(exclude_categories=("C",)))
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(-1e300, 1e300) | TEXT
)
VALUES = st.recursive(
    SCALARS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
)


@settings(deadline=None)
@given(VALUES)
def test_what_is_written_is_read(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert read_json(path) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "deep"),
        ("[" * 100 + "]" * 100, "deep"),
        ("1" + "0" * 400, "401 digits"),
        ("9" * 5000, "5000 digits"),
        ("1e999", "no finite"),
        ("NaN", "no finite"),
        ('{"a": -Infinity}', "no finite"),
        ("{", "not JSON"),
    ],
)
def test_bad_json_is_one_sentence(text, words):
    with pytest.raises(BadFileError, match=words):
        parse_json(text)


@settings(deadline=None)
@given(st.text())
def test_any_text_is_json_or_refused(text):
    try:
        value = parse_json(text)
    except BadFileError:
        return
    assert json.loads(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "stands for"),
        ("a: &a [*a]", "recursive"),
        ("a: &a {b: *a}", "recursive"),
        ("[" * 2000 + "]" * 2000, "deep"),
        ("a: " + "7" * 5000, "digits"),
        (r'a: "\e[2J"', "control character"),
        (r'"\u202e": a', "control character"),
    ],
)
def test_yaml_that_stands_for_too_much_is_refused(tmp_path, text, words):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(BadFileError, match=words):
        read_yaml(tmp_path / "x.yaml")


def test_large_and_foreign_files_are_refused(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadFileError, match="UTF-8"):
        read_json(tmp_path / "x.json")
    with (tmp_path / "y.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(BadFileError, match="larger"):
        read_json(tmp_path / "y.json")


def test_files_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_json(tmp_path / "x.json", {})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o640


def test_nothing_is_left_of_a_failed_write(tmp_path):
    write_json(tmp_path / "x.json", {"old": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", object())
    assert read_json(tmp_path / "x.json") == {"old": 1}
    assert os.listdir(tmp_path) == ["x.json"]
