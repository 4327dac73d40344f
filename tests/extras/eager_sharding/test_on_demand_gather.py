"""Rounds of gatherings: right and without a hang whatever each rank requests, ahead where all
repeat themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from alpa_strategy.extras.eager_sharding.on_demand_gather import OnDemandGather

FINISH = -1
PAUSE = -3
UNITS = 6


class Talk:
    """Rounds of this rank; a unit's value is its number from every rank, so gatherings in another
    order are seen.
    """

    def __init__(self, depth: int = 1) -> None:
        self.num_started = 0
        self.ahead = 0
        self.num_under_way = 0
        self.num_said = 0
        self.group, said = dist.new_group(), dist.new_group()
        self.on_demand = OnDemandGather(
            self.start, lambda unit, ahead: unit != 5 and len(ahead) < depth, said
        )
        spoken = self.on_demand._exchange
        self.on_demand._exchange = lambda *args: (
            setattr(self, "num_said", self.num_said + 1),
            spoken(*args),
        )[1]

    def start(self, unit: int) -> Callable[[], list[torch.Tensor]]:
        found = torch.empty(dist.get_world_size(), dtype=torch.int64)
        work = dist.all_gather_into_tensor(found, torch.tensor([unit]), self.group, async_op=True)
        self.num_started, self.num_under_way = self.num_started + 1, self.num_under_way + 1
        self.ahead = max(self.ahead, self.num_under_way)

        def wait() -> list[torch.Tensor]:
            work.wait()
            self.num_under_way -= 1
            assert found.tolist() == [unit] * len(found)
            return [found]

        return wait

    def step(self, asked: list[int]) -> tuple[int, int]:
        """Asks for units in turn; how many rounds and gatherings that took."""
        said, started = self.num_said, self.num_started
        self.on_demand.begin()
        for unit in asked:
            if unit == FINISH:
                self.on_demand.finish()
            elif unit == PAUSE:
                self.on_demand.pause()
            else:
                assert self.on_demand.fetch(unit)[0][0] == unit
        self.on_demand.pause()
        self.on_demand.finish()
        return self.num_said - said, self.num_started - started


def same_steps(depth: int) -> tuple[list[tuple[int, int]], int]:
    talk = Talk(depth)
    return [talk.step([0, 1, 2, FINISH, 2, 1, 5, 0]) for _ in range(3)], talk.ahead


def other_steps(seed: int) -> None:
    """Each rank departs from what all do, now and then, for a step or for good."""
    talk = Talk(seed)
    common = random.Random(seed)
    own = random.Random(1000 * seed + dist.get_rank())
    asked = [0]
    for _ in range(60):
        if common.random() < 0.3:
            # Others' own pauses and ends in another number would not meet: FINISH stays where it
            # is.
            asked = [common.choice([*range(UNITS), PAUSE]) for _ in range(common.randrange(9))]
        mine = list(asked)
        if own.random() < 0.3:
            mine[own.randrange(len(mine) + 1) :] = [
                own.choice([*range(UNITS), PAUSE]) for _ in range(own.randrange(6))
            ]
        talk.step(mine)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_repeated_is_agreed_on_once_and_gathered_ahead(pool, depth: int) -> None:
    for steps, ahead in pool.run(2, same_steps, depth):
        assert steps == [
            (9, 7),
            (4, 7),
            (4, 7),
        ]  # a round for each half of the step, and one to end each
        assert ahead == 1 + depth


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_may_depart(pool, ranks: int) -> None:
    pool.run(ranks, other_steps, ranks)
