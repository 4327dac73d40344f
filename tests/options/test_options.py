"""Options say what is wrong and what is allowed; equal options have equal digests."""

import pytest

from alpa_strategy import AlpaStrategy
from alpa_strategy.errors import OptionError
from alpa_strategy.options import PlanOptions


def test_defaults_are_what_from_user_gives() -> None:
    assert PlanOptions.from_user() == PlanOptions()


def test_values_are_frozen_and_sizes_are_read() -> None:
    options = PlanOptions.from_user(
        parallel=["data", "tensor"],
        logical_mesh=[2, 4],
        placements={"*.bias": "R*  R", "head.*": "S0 R*"},
        memory_limit="16GiB",
        solver_seconds=5,
    )
    assert options.parallel == ("data", "tensor")
    assert options.logical_mesh == (2, 4)
    assert options.placements == (("*.bias", "R* R"), ("head.*", "S0 R*"))
    assert options.memory_limit == 16 * 2**30
    assert PlanOptions.from_user(memory_limit="16 GB").memory_limit == 16e9
    devices = PlanOptions.from_user(
        device_map={"embed.*": "0-2, 7", "head.*": [5, 4], "norm.*": 3}
    ).device_map
    assert devices == (("embed.*", (0, 1, 2, 7)), ("head.*", (4, 5)), ("norm.*", (3,)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"schedule": "1f1"},
            r"schedule='1f1' is not known.*did you mean '1f1b'\? Use one of GPipe",
        ),
        ({"paralel": "data"}, "did you mean 'parallel'"),
        ({"memory_limits": 1}, "did you mean 'memory_limit'"),
        ({"xyz": 1}, "unknown option 'xyz'"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"compile": {"modes": "default"}}, "did you mean 'mode'"),
        ({"compile": {"mode": "reduce-overhead"}}, "CUDA graphs.*"),
        ({"compile": {"mode": "fastest"}}, "Unrecognized mode=fastest"),
        ({"compile": {"backend": "inducktor"}}, "Invalid backend: 'inducktor'"),
        ({"compile": {"options": {"max_autotun": True}}}, "max_autotun\n"),
        ({"parallel": "pipeline"}, "parallel='pipeline'.*"),
        ({"parallel": ["data", "tensor"]}, "logical_mesh"),
        ({"parallel": ["data"], "logical_mesh": [2, 2]}, "one name per mesh axis"),
        ({"parallel": 3}, "parallel=3"),
        ({"logical_mesh": [2, 0]}, "logical_mesh"),
        ({"logical_mesh": "2x2"}, "logical_mesh='2x2'"),
        ({"logical_mesh": [2, 2, 2]}, "one or two"),
        ({"placements": {"a": "Q0"}}, "Q0"),
        ({"placements": {"a": "S0"}, "logical_mesh": [2, 2]}, "is for 1 axis, logical_mesh"),
        ({"placements": "S0"}, "mapping"),
        ({"device_map": "0-3"}, "device_map='0-3' is no mapping"),
        ({"device_map": {"a": "3-1"}}, "device_map={'a': '3-1'}"),
        ({"device_map": {"a": "0-x"}}, "device_map={'a': '0-x'}"),
        ({"device_map": {"a": "0-99999999999"}}, "device_map=.*99999999999"),
        ({"device_map": {"a": [-1]}}, "device_map={'a'"),
        ({"device_map": {"a": []}}, "device_map={'a'"),
        ({"solver": "lp"}, "ilp, propagation"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"memory_limit": "16 bananas"}, "16 bananas"),
        ({"memory_fraction": 1.5}, "at most 1"),
        ({"memory_fraction": "all"}, "memory_fraction='all'"),
        ({"batch_scope": "node"}, "rank, global"),
        ({"solver_seconds": 0}, "solver_seconds"),
        ({"baselines": "yes"}, "baselines"),
    ],
)
def test_wrong_options_are_named(wrong: dict, message: str) -> None:
    with pytest.raises(OptionError, match=f"(?s){message}"):
        PlanOptions.from_user(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"master_weights": "no"}, "master_weights='no' is neither true nor false"),
        (
            {"capture": "never", "num_stages": 2},
            'capture="never" has steps run eagerly, but a pipeline',
        ),
        ({"capture": "never", "parallel": "tensor"}, "but parallel='tensor' is asked for"),
        ({"batch_scope": "replica", "offload": True}, "but offload=True is asked for"),
        ({"profile_steps": 3}, "profile_steps=3 are no steps"),
        ({"profile_steps": (3, 3)}, "the first step and the one after the last"),
        ({"profile_steps": (-1, 3)}, "profile_steps=\\(-1, 3\\)"),
        ({"profile_steps": (1, 2, 3)}, "profile_steps="),
        ({"profile_steps": ("1", "2")}, "profile_steps="),
    ],
)
def test_what_a_strategy_cannot_mean_is_told_when_it_is_made(wrong: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AlpaStrategy(**wrong)


def test_digest_depends_on_every_option() -> None:
    base = PlanOptions.from_user().digest()
    for change in (
        {"parallel": "data"},
        {"logical_mesh": [2]},
        {"placements": {"*": "R"}},
        {"memory_limit": 1e9},
        {"memory_limit": float("inf")},
        {"memory_fraction": 0.5},
        {"batch_scope": "global"},
    ):
        assert PlanOptions.from_user(**change).digest() != base
        assert PlanOptions.from_user(**change).digest() == PlanOptions.from_user(**change).digest()
