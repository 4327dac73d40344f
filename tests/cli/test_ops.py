"""`alpa ops`: every op's rule, where it comes from, and what was proved of it."""

import json

import pytest
from rich.cells import cell_len

from alpa_strategy.cli import main
from alpa_strategy.display import op_table
from alpa_strategy.display.op_table import OpRow, op_rows, rule_lines
from alpa_strategy.errors import OptionError


def shown(command, capsys, monkeypatch, width=80):
    """What the command prints on a terminal of that many columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(command) == 0
    return capsys.readouterr().out


def test_a_rule_stands_there_in_index_notation_with_its_proofs(capsys, monkeypatch):
    text = shown(["ops", "aten.linear.default"], capsys, monkeypatch, width=120)
    assert "[*b, k], [n, k], +[n]? -> [*b, n]" in text
    assert "notation" in text
    assert " runs" in text
    assert "wrong: 0" in text


@pytest.mark.parametrize("pattern", ["*", "*softmax*", "aten.linear"])
def test_the_table_is_80_columns_wide(pattern, capsys, monkeypatch):
    lines = shown(["ops", pattern], capsys, monkeypatch).splitlines()
    table = lines[: lines.index("PyTorch's operator database:")]
    assert len(table) > 3
    assert max(map(cell_len, table)) <= 80


def test_a_glob_and_a_part_of_a_name_find_ops():
    everything = [row.op for row in op_rows()]
    softmax = [row.op for row in op_rows("*softmax*")]
    assert softmax == [op for op in everything if "softmax" in op]
    assert [row.op for row in op_rows("softmax")] == softmax
    assert [row.op for row in op_rows("aten.mm.default")] == ["aten.mm.default"]
    assert all(row.op.startswith("aten.conv") for row in op_rows("aten.conv*"))


def test_every_rule_of_the_table_is_listed():
    listed = {row.op for row in op_rows()}
    families = {op.rpartition(".")[0] for op in listed}
    assert rule_lines().keys() <= listed | families


def test_json_says_what_is_proved_and_what_is_not(capsys):
    assert main(["ops", "--json"]) == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)}
    linear, whole = rows["aten.linear.default"], rows["aten._scaled_mm.default"]
    assert linear["proved"]
    assert linear["rule"].startswith("[*b, k]")
    assert linear["num_proved"] > 0
    assert not whole["proved"]
    assert whole["origin"] == "replicated"
    assert whole["why"]
    assert not any(row["wrong"] for row in rows.values())


def test_no_op_matches_is_an_error_that_names_the_nearest(capsys):
    assert main(["ops", "aten.linaer.default"]) == 2
    error = capsys.readouterr().err
    assert "no op matches 'aten.linaer.default'" in error
    assert "aten.linear.default" in error


@pytest.mark.parametrize(
    ("pattern", "op"),
    [
        ("aten.ger*", "aten::ger"),
        ("aten::ger", "aten::ger"),
        ("ger", "aten::ger"),
        ("aten.bucketize.Scalar", "aten::bucketize.Scalar"),
    ],
)
def test_an_op_of_torch_without_a_rule_is_an_error_that_says_so(capsys, pattern, op):
    assert main(["ops", pattern]) == 2
    error = capsys.readouterr().err
    assert f"{op} has no sharding rule: it runs in full on every device" in error
    assert f"register_sharding({op!r}, ...)" in error


@pytest.mark.parametrize("pattern", ["aten.clone.Odd", "aten.__name__", "no.such.op", "["])
def test_what_is_no_op_has_no_row(pattern):
    with pytest.raises(OptionError, match="no op matches"):
        op_rows(pattern)


def test_a_pointwise_op_without_samples_is_shown(capsys):
    assert main(["ops", "--json", "aten.clone"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["op"] == "aten.clone.default"
    assert row["origin"] == "pointwise"


def test_what_is_stored_is_text_not_markup(capsys, monkeypatch):
    odd = OpRow("aten.odd[/nope]", "notation", "[*b, k], [red] -> [/x]", (), 0, ("S0->S0",), "")
    monkeypatch.setattr(op_table, "_all_rows", lambda: [odd])
    text = shown(["ops", "*"], capsys, monkeypatch, width=120)
    assert "aten.odd[/nope]" in text
    assert "[*b, k], [red] -> [/x]" in text
    assert "1 wrong" in text
