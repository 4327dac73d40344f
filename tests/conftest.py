"""Fixtures for all tests: one worker pool per session plays the ranks of multi-device jobs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault(
    "DS_ACCELERATOR", "cpu"
)  # silences DeepSpeed's probe on machines without GPUs
sys.path.insert(0, str(Path(__file__).parent))

from worker_pool import WorkerPool

# Times are no law: a loaded machine takes five times as long.
settings.register_profile("alpa", deadline=None)
settings.load_profile("alpa")

# Tests without process groups that take seconds each all the same: scripts/test.sh runs them,
# test_quick.sh does not.
NOT_QUICK = {
    "test_broken_contracts_fail",
    "test_damaged_files_are_refused",
    "test_a_loop_over_time_in_two_stages",
    "test_a_loop_over_time_is_priced_at_or_just_above_its_ilp",
    "test_a_pipeline_where_the_network_binds",
    "test_a_measured_cluster_is_equal_on_all_ranks_and_prices_every_logical_mesh",
    "test_a_rank_without_the_file_makes_all_measure",
    "test_a_representative_part_has_proved_rules",
    "test_a_stage_that_does_not_fit_is_named",
    "test_any_divisor",
    "test_equals_brute_force_with_memory_limit",
    "test_every_combination_is_right_on_a_mesh",
    "test_large_experts_are_sharded_and_tokens_are_sent_to_them",
    "test_layers_to_price_do_not_grow_with_depth",
    "test_loss_falls",
    "test_module_runs_as_a_command",
    "test_plans_are_whole_and_keep_to_the_options",
    "test_runs_are_priced_at_or_just_above_their_ilp",
    "test_small_gap_with_tight_memory",
    "test_tables_of_a_mixture_of_experts_stay_small",
    "test_the_code_runs_on_public_names",
    "test_the_diffs_do_what_they_say",
    "test_what_the_error_offers_can_be_had",
}
# Folders whose tests start processes of their own, or train under a Trainer.
NOT_QUICK_FOLDERS = {
    "browser",
    "checkpoint",
    "conformance",
    "equality",
    "failure_watch",
    "install",
    "strategy",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `quick` what scripts/test_quick.sh runs: tests of one process, about a second at
    most.
    """
    for item in items:
        names = getattr(item, "fixturenames", ())
        folders = item.path.relative_to(Path(__file__).parent).parts[:-1]
        in_slow_folder = not NOT_QUICK_FOLDERS.isdisjoint(folders)
        slow = "pool" in names or item.get_closest_marker("slow") or in_slow_folder
        if not slow and item.name.partition("[")[0] not in NOT_QUICK:
            item.add_marker(pytest.mark.quick)
    _put_long_files_first(items)


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """Put files whose tests are all quick last: then both workers are busy to the end."""
    long_files = set()
    for item in items:
        if not (item.get_closest_marker("quick") or item.get_closest_marker("slow")):
            long_files.add(item.path)
    items.sort(key=lambda item: item.path not in long_files)


def pytest_collection_finish() -> None:
    """Leave all modules and tests out of later collections of garbage, which take 0.2 s with
    them.
    """
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """`pool.run(world_size, fn, *args)`: run a top-level test function on several ranks."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def unchanged_environment() -> Iterator[None]:
    """What a test leaves in the environment (seed_everything: PL_GLOBAL_SEED) would reach workers
    that start later.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
