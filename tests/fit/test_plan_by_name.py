"""`alpa plan hf:...`: from a config.json to an answer, without weights, network or devices."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fit.small import write_config

from alpa_strategy.cli import main
from alpa_strategy.fit.flags import BatchDivision, batch_division
from alpa_strategy.ir.plan import MEMORY_PARTS, NO_BOUND, Plan

pytest.importorskip("transformers")

CLUSTER = ["--cluster", "dgx_h100", "cluster.num_nodes=1"]
ASKED = [*CLUSTER, "--seq", "128", "--batch", "16"]
SMALL = [*ASKED, "--changes", "0"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_answer_fits_one_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = write_config(tmp_path / "tiny-llama")
    path = str(tmp_path / "plan.json")
    code = main(["plan", f"hf:{folder}", *ASKED, "--changes", "1", "-o", path])
    out = capsys.readouterr().out
    assert code == 0
    # The stored plan has the change that was planned, in place of an estimate.
    (change,) = Plan.load(path).figures.planned_changes
    assert change.partition(":")[0] in out
    assert main(["show", path]) == 0
    assert change in " ".join(capsys.readouterr().out.split())
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for word in (
        "tiny-llama",
        "fits",
        "tokens/s",
        "MFU",
        "plan",
        "weights",
        "Megatron-LM",
        "torchtitan",
        "DeepSpeed",
    ):
        assert word in out
    # The peak is what its parts sum to, beside the limit and what is left of the device.
    (fits,) = [line for line in lines if line.startswith("fits")]
    peak = re.search(r"yes  peak (\S+ \S+) of 71.2 GiB per device", fits)
    assert peak is not None
    at = next(index for index, line in enumerate(lines) if "activations" in line)
    assert lines[at].split()[-1] == "sum"
    assert lines[at + 1].rstrip().endswith(peak[1])
    assert "7.92 GiB of a device's 79.2 GiB" in out
    assert not any(line.strip() in ("GiB", "MiB") for line in lines)


@pytest.mark.parametrize("name", ["config.json", ""])
def test_source_is_a_folder_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = write_config(tmp_path / "tiny")
    code, out = run(capsys, f"hf:{folder / name}", *SMALL)
    assert code == 0
    assert out.count("tiny, ") == 1


def test_parts_of_memory_sum_to_the_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "tiny")
    two = "cluster.devices_per_node=2"
    pinned = ["plan.num_stages=2", "plan.num_microbatches=4", "plan.remat=true"]
    for number, more in enumerate(([], pinned)):
        file = tmp_path / f"{number}.json"
        code, out = run(capsys, f"hf:{folder}", *SMALL, two, *more, "-o", str(file))
        assert code == 0, out
        plan = Plan.load(file)
        # Unequal stages and other schedules were not looked at.
        assert plan.gap == NO_BOUND
        for stage in plan.stages:
            assert set(stage.predicted.memory) == set(MEMORY_PARTS)
            assert sum(stage.predicted.memory.values()) == stage.predicted.peak_bytes
            assert min(stage.predicted.memory.values()) >= 0


def test_step_that_cannot_be_split_is_planned_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts in a grouped matmul sort the tokens of all sequences."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder = write_config(tmp_path / "tiny", model_type="olmoe", **experts)
    file = tmp_path / "plan.json"
    more = ["--batch", "64", "cluster.devices_per_node=2", "-o", str(file)]
    code, out = run(capsys, f"hf:{folder}", *SMALL, *more)
    assert code == 0, out
    assert Plan.load(file).num_microbatches == 1


def test_short_sequences_are_computed_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan is at least as fast as those with a number of micro-batches."""
    folder = write_config(tmp_path / "tiny")
    seconds = {}
    for pins in ((), ("plan.num_microbatches=1",), ("plan.num_microbatches=8",)):
        file = tmp_path / "plan.json"
        asked = [*SMALL, "--batch", "64", "cluster.devices_per_node=2", *pins, "-o", str(file)]
        code, out = run(capsys, f"hf:{folder}", *asked)
        assert code == 0, out
        seconds[pins] = Plan.load(file).predicted.step_seconds
    assert seconds[()] <= min(seconds.values()) * 1.001


def test_lora_trains_adapters_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    folder = write_config(tmp_path / "tiny")
    full = tmp_path / "full.json"
    adapted = tmp_path / "lora.json"
    small = [*SMALL, "cluster.devices_per_node=2"]
    assert run(capsys, f"hf:{folder}", *small, "-o", str(full))[0] == 0
    code, out = run(capsys, f"hf:{folder}", *small, "--lora", "4", "-o", str(adapted))
    assert code == 0, out
    assert "trained" in out
    states = [Plan.load(file).stages[0].predicted.memory["state"] for file in (full, adapted)]
    assert states[1] < states[0] / 4


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        ({"model_type": "no_such_model"}, [], "model_type"),
        ({"model_type": "vit"}, [], "language model"),
        ({"hidden_size": 250}, [], "configuration"),
        ({}, ["--optimizer", "adamv"], "adamw"),
        ({}, ["--precision", "fp4"], "precision"),
        ({}, ["--batch", "0"], "--batch"),
        ({}, ["model.lr=1"], "is for recipes"),
    ],
)
def test_mistakes_are_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, object],
    flags: list[str],
    words: str,
) -> None:
    folder = write_config(tmp_path / "tiny", **change)
    code, out = run(capsys, f"hf:{folder}", *SMALL, *flags)
    assert code == 2
    assert words in out
    assert "Traceback" not in out


def test_missing_files_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source in (str(tmp_path / "nothing"), f"{tmp_path}/nothing.json", str(tmp_path)):
        code, out = run(capsys, f"hf:{source}", *SMALL)
        assert code == 2
        assert "what to do" in out


def test_whatif_answers_for_a_longer_sequence_and_a_faster_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path / "tiny") / "config.json"
    asked = [*CLUSTER, "cluster.devices_per_node=2", "--seq", "64", "--batch", "4"]
    changes = ["--set", "seq=2x", "--set", "intra_node.bandwidth=2x"]
    assert main(["whatif", f"hf:{file}", *asked, *changes]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("as it is", "seq=2x", "intra_node.bandwidth=2x", "all of them"):
        assert words in out
    assert "The plan as it is would take" in out


def test_whatif_says_that_a_change_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "tiny")
    asked = [*CLUSTER, "cluster.devices_per_node=2", "--seq", "64", "--batch", "4"]
    assert main(["whatif", f"hf:{folder}", *asked, "--set", "plan.memory_limit=1MiB"]) == 2
    captured = capsys.readouterr()
    assert "no plan" in captured.out
    assert "no plan fits: at least" in captured.err


@pytest.mark.parametrize(
    ("change", "words"),
    [("seq=long", "no whole number"), ("lora=2x", "no multiple"), ("model.lr=1", "for recipes")],
)
def test_changes_of_a_model_by_name_that_cannot_be_are_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, words: str
) -> None:
    folder = write_config(tmp_path / "tiny")
    assert main(["whatif", f"hf:{folder}", *ASKED, "--set", change]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_what_does_not_fit_has_changes_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "tiny")
    limit = "plan.memory_limit=6MiB"
    code, out = run(capsys, f"hf:{folder}", *ASKED, limit, "--changes", "1")
    assert code == 2
    assert "fits  no" in out
    (flags,) = re.findall(r"^ *(--\S+ \S+|\S+=\S+) +fits, ", out, re.MULTILINE)
    changed = [*ASKED, limit, *flags.split(), "--changes", "0"]
    code, out = run(capsys, f"hf:{folder}", *changed)
    assert code == 0, out
    assert "fits   yes" in out


# A step whose fastest layouts need more memory than ZeRO-3.
TIGHT = [
    *("--cluster", "a100_40gb", "cluster.num_nodes=1", "--seq", "512", "--batch", "16"),
    *("--changes", "0", "plan.logical_mesh=[2,4]", "plan.num_stages=1", "plan.remat=true"),
    *("plan.num_microbatches=8", "plan.memory_limit=42MiB"),
]


def test_what_fits_by_name_fits_without_the_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "tiny", vocab_size=4096)
    seconds = []
    texts = []
    for number, more in enumerate((["plan.parallel=zero3"], [])):
        file = tmp_path / f"{number}.json"
        code, out = run(capsys, f"hf:{folder}", *TIGHT, *more, "-o", str(file))
        assert code == 0, out
        plan = Plan.load(file)
        assert plan.predicted.peak_bytes <= 42 * 2**20
        seconds.append(plan.predicted.step_seconds)
        texts.append(" ".join(out.split()))
    assert seconds[1] <= seconds[0]
    # No change was planned.
    assert "none of the changes" not in texts[0]
    # Two sequences of a micro-batch among eight devices.
    assert "--context-parallel-size 4 --micro-batch-size 1 --global-batch-size 16" in texts[0]
    assert "--parallelism.context_parallel_degree 4" in texts[0]
    assert "data_parallel_shard_degree 2" in texts[0]
    assert '"train_batch_size": 16' in texts[0]
    assert "gradient_accumulation_steps" not in texts[0]


def test_flags_divide_a_sequence_among_devices() -> None:
    # Two sequences of a micro-batch among eight devices.
    assert batch_division(2, 8) == BatchDivision(data=2, context=4, micro=1)
    assert batch_division(16, 8) == BatchDivision(data=8, context=1, micro=2)


@pytest.mark.slow
def test_names_of_two_axes_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path / "tiny")
    names = ["plan.logical_mesh=[2,4]", "plan.parallel=[zero3,tensor]"]
    pinned = ["plan.num_microbatches=4", "plan.remat=true"]
    code, out = run(capsys, f"hf:{folder}", *SMALL, *names, *pinned)
    assert code == 0, out
    assert "ZeRO-3" in out


def test_least_need_of_all_configurations_is_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path / "tiny")
    code, out = run(capsys, f"hf:{folder}", *SMALL, "plan.memory_limit=1MiB")
    assert code == 2
    assert "none of the changes" not in out
    answer, _, error = " ".join(out.split()).partition("error:")
    least = re.search(r"fits no at least (\S+ MiB) of 1.00 MiB a device \(\d+ stages? of", answer)
    assert least is not None, out
    needs = re.findall(r"needs (?:about )?(\S+) MiB of", error)
    assert float(least[1].split()[0]) == min(map(float, needs))
    assert len(needs) >= 8


def test_sweep_is_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path / "tiny")
    picture = tmp_path / "sweep.svg"
    sweep = ["--sweep", "devices=1,8", "--picture", str(picture)]
    code, out = run(capsys, f"hf:{folder}", *SMALL, *sweep)
    assert code == 0, out
    assert re.search(r"^ *1 .*━", out, re.MULTILINE)
    assert re.search(r"^ *8 .*━", out, re.MULTILINE)
    assert picture.read_text().count("<rect") == 2
