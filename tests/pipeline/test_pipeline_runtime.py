"""What a pipeline promises beside right values: memory in flight, no leaks, faults that are
named.
"""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pipeline_net import LOSS, StageCase, build, check_steps, global_batch, rank_rows, with_program

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.errors import LostRankError
from alpa_strategy.schedules import actions, in_flight

TWO = (StageCase((0,), (0, 1)), StageCase((1,), (2, 3)))
THREE = tuple(StageCase((i,), (i,)) for i in range(3))


def looped(num_ranks, num_stages):
    return tuple(StageCase((i % num_ranks,), (i,)) for i in range(num_stages))


def folded(num_ranks):
    return tuple(StageCase((min(i, 2 * num_ranks - 1 - i),), (i,)) for i in range(2 * num_ranks))


STAGES = {
    "GPipe": THREE,
    "1F1B": THREE,
    "LoopedBFS": looped(2, 4),
    "Interleaved1F1B": looped(2, 4),
    "InterleavedZeroBubble": looped(2, 4),
    "ZBVZeroBubble": folded(2),
}


def run_schedule(schedule, num_microbatches):
    stages = STAGES[schedule]
    return check_steps(stages, schedule, num_microbatches, len(stages), False, 1)


@pytest.mark.parametrize("schedule", STAGES)
def test_microbatches_in_flight_are_what_the_schedule_promises(pool, schedule):
    num_ranks = len({stage.ranks for stage in STAGES[schedule]})
    per_rank = pool.run(num_ranks, run_schedule, schedule, 6)
    assert tuple(per_rank) == in_flight(schedule, num_ranks, 6, len(STAGES[schedule]) // num_ranks)


def executed(schedule, num_microbatches):
    """What this rank's stages do in a step, as torch writes it."""
    stages = STAGES[schedule]
    _, pipeline, _ = build(stages, schedule, num_microbatches, len(stages))
    done = []

    def noted(stage, kind, run):
        def noting(microbatch, **how):
            done.append(f"{stage}{'I' if how.get('in_halves') else kind}{microbatch}")
            run(microbatch, **how)

        return noting

    for stage, worker in pipeline._workers.items():
        for kind, name in {"F": "forward", "B": "backward", "W": "backward_weights"}.items():
            setattr(worker, name, noted(stage, kind, getattr(worker, name)))
    pipeline.step(rank_rows(global_batch()))
    return done


@pytest.mark.parametrize("schedule", STAGES)
def test_what_was_planned_is_executed(pool, schedule):
    """In torch's orders, see tests/inter_op/test_schedules.py."""
    num_ranks = len({stage.ranks for stage in STAGES[schedule]})
    per_rank = pool.run(num_ranks, executed, schedule, 6)
    planned = actions(schedule, num_ranks, 6, len(STAGES[schedule]) // num_ranks)
    texts = []
    for row in planned:
        texts.append([f"{a.stage}{a.kind}{a.microbatch}" for a in row])
    assert per_rank == texts


def no_random_state():
    """A bookmark of a program without random numbers."""
    return nullcontext


def run_watched(schedule, recomputes=False):
    """Most activations alive at once, and how many are left after three steps without the garbage
    collector.
    """
    stages = STAGES[schedule]
    _, pipeline, own = build(stages, schedule, 6, len(stages))
    alive, most = weakref.WeakSet(), [0]

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.save_for_backward(tensor)
            alive.add(ctx)
            most[0] = max(most[0], len(alive))
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    for stage in own.values():

        def program(inputs, inner=stage.program.spans[0].program):
            escaping, sent, made = inner(inputs)
            for value, tensor in sent.items():
                if tensor.requires_grad:
                    sent[value] = Watched.apply(tensor)
            return escaping, sent, made

        # the recomputation draws no random numbers, so its bookmark restores nothing
        if recomputes:
            bookmark = no_random_state
        else:
            bookmark = None
        stage.program = replace(with_program(stage.program, program), bookmark=bookmark)
    gc.collect()
    gc.disable()
    try:
        for step in range(3):
            pipeline.step(rank_rows(global_batch(step)))
        left = len(alive)
    finally:
        gc.enable()
    return most[0], left


@pytest.mark.parametrize("schedule", STAGES)
def test_nothing_is_left_after_a_step(pool, schedule):
    num_ranks = len({stage.ranks for stage in STAGES[schedule]})
    results = pool.run(num_ranks, run_watched, schedule)
    assert all(left == 0 for _, left in results)
    if schedule == "1F1B":  # stage 0 sends h1 and stage 1 h2, one Watched each
        assert [most for most, _ in results[:2]] == [3, 2]


@pytest.mark.parametrize("schedule", STAGES)
def test_recomputation_keeps_the_activations_of_one_micro_batch(pool, schedule):
    num_ranks = len({stage.ranks for stage in STAGES[schedule]})
    results = pool.run(num_ranks, run_watched, schedule, True)
    assert [most for most, _ in results[:-1]] == [1] * (
        num_ranks - 1
    )  # the last stage sends nothing
    assert all(left == 0 for _, left in results)


def keep_grads_and_scale():
    net, pipeline, own = build(TWO, "1F1B", 3, 4)
    marks = {p: torch.full_like(p, 7.0) for o in own.values() for p in o.parameters.values()}
    for parameter, mark in marks.items():
        parameter.grad = mark
    batch = global_batch()
    _, once = pipeline.step(rank_rows(batch))
    _, twice = pipeline.step(rank_rows(batch), loss_scale=2.0)
    for (p, grad), (q, double) in zip(once, twice, strict=True):
        assert p is q
        assert p.grad is marks[p]
        torch.testing.assert_close(double, 2 * grad)
    assert net.count.item() == 0  # the module's own buffer is the caller's to update


def test_gradients_are_handed_out_and_grad_stays(pool):
    pool.run(2, keep_grads_and_scale)


def gather_on_the_target():
    slow = ClusterSpec.load("p3_16xlarge_x8", {"num_nodes": 2, "devices_per_node": 2})
    stages = (StageCase((0, 1), (0, 1)), StageCase((2, 3), (2, 3), "T"))
    check_steps(stages, "1F1B", 3, 4, True, 2, slow)
    _, pipeline, _ = build(stages, "1F1B", 3, 4, False, slow)
    return [plan.gathers for channel in pipeline.channels for plan in channel.forward]


def test_replicas_of_the_target_share_what_they_receive(pool):
    per_rank = pool.run(4, gather_on_the_target)
    assert all(any(gathers) for gathers in per_rank)


def lose_rank():
    stages = tuple(StageCase((i,), (i,)) for i in range(3))
    _, pipeline, own = build(stages, "1F1B", 6, 3)
    pipeline.step(rank_rows(global_batch()))
    if dist.get_rank() == 1:
        inner, calls = own[1].program.spans[0].program, []

        def program(*args):
            calls.append(None)
            if len(calls) == 3:
                dist.destroy_process_group()
                raise KeyboardInterrupt
            return inner(*args)

        own[1].program = with_program(own[1].program, program)
    start = time.monotonic()
    try:
        pipeline.step(rank_rows(global_batch()))
    except KeyboardInterrupt:
        return None, 0.0
    except LostRankError as error:
        return str(error), time.monotonic() - start
    return "no error", time.monotonic() - start


def test_a_lost_rank_is_named(pool):
    results = pool.run(3, lose_rank)
    for message, seconds in (results[0], results[2]):
        assert "rank 1 is gone" in message
        assert seconds < 10


def wait_for_hung_rank():
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    _, pipeline, _ = build(TWO, "1F1B", 3, 4)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["reported"], timedelta(seconds=60))
        return None
    start = time.monotonic()
    try:
        pipeline.step(rank_rows(global_batch()))
    except LostRankError as error:
        return str(error), time.monotonic() - start
    finally:
        store.set("reported", "1")
    return None


def test_a_hung_rank_is_named_within_the_timeout(pool):
    (message, seconds), _ = pool.run(2, wait_for_hung_rank, init_group=False)
    assert "rank 1" in message
    assert "in time" in message
    assert seconds < 10


def break_off_and_go_on(schedule):
    """Every rank's second step fails, after its first backwards; the third step is as if nothing
    had been.
    """
    stages = STAGES[schedule]
    _, pipeline, own = build(stages, schedule, 6, len(stages))
    first, gradients_before = pipeline.step(rank_rows(global_batch()))
    buffers = {index: dict(stage.buffers) for index, stage in own.items()}
    stage, calls = own[min(own)], []
    whole = stage.program

    def failing(inputs):
        calls.append(None)
        # at a moment when no rank waits for a message that another has not sent
        if len(calls) == 4 - min(own):
            raise ValueError("of the user's own")
        return whole.spans[0].program(inputs)

    stage.program = with_program(whole, failing)
    with pytest.raises(ValueError, match="of the user's own"):
        pipeline.step(rank_rows(global_batch()))
    for worker in pipeline._workers.values():
        assert not worker._in_flight
        assert not worker.escaped
    stage.program = whole
    for index, restored in own.items():
        restored.buffers.update(buffers[index])
        restored.store.after_optimizer_step()
    third, gradients_after = pipeline.step(rank_rows(global_batch()))
    assert third[LOSS] == first[LOSS]
    for (_, before), (_, after) in zip(gradients_before, gradients_after, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_after_an_exception_the_next_step_is_right(pool, schedule):
    pool.run(len({stage.ranks for stage in STAGES[schedule]}), break_off_and_go_on, schedule)
