"""Random ops on a mesh: other numbers on other shards, the same on replicas, reproducible."""

import pytest
import torch
import torch.nn.functional as F
from proofs.thread_mesh import run_on_threads

from alpa_strategy.comm.random import ShardedRandom


def draw(mesh, seed, axes_per_call):
    random = ShardedRandom(mesh, seed)
    x = torch.ones(50)
    return [random.run(axes, torch.rand_like, x) for axes in axes_per_call]


@pytest.mark.parametrize("random_axes", [(), (0,), (1,), (0, 1)])
def test_differs_exactly_over_the_random_axes(random_axes):
    shape = (2, 3)
    ranks = run_on_threads(shape, lambda mesh: (mesh.coordinate, draw(mesh, 1, [random_axes] * 2)))
    for coordinate, own in ranks:
        assert not torch.equal(own[0], own[1])
        for other_coordinate, other in ranks:
            same = all(coordinate[a] == other_coordinate[a] for a in random_axes)
            assert torch.equal(own[0], other[0]) == torch.equal(own[1], other[1]) == same


def test_the_seed_decides_and_not_the_default_generator():
    calls = [(0,), (), (0,), ()]
    torch.manual_seed(3)
    first = run_on_threads((2,), lambda mesh: draw(mesh, 7, calls))
    torch.manual_seed(4)
    before = torch.get_rng_state()
    again = run_on_threads((2,), lambda mesh: draw(mesh, 7, calls))
    other = run_on_threads((2,), lambda mesh: draw(mesh, 8, calls))
    assert torch.equal(torch.get_rng_state(), before)  # untouched for everybody else
    for a, b, c in zip(first, again, other, strict=True):
        assert all(map(torch.equal, a, b))
        assert not any(map(torch.equal, a, c))


def test_one_device_draws_what_the_plain_module_draws():
    x = torch.ones(4, 4)
    torch.manual_seed(0)
    plain = [F.dropout(x), F.dropout(x)]

    def work(mesh):
        random = ShardedRandom(mesh, 5)
        return [random.run((0,), F.dropout, x), random.run((), F.dropout, x)]

    torch.manual_seed(0)
    assert all(map(torch.equal, run_on_threads((1, 1), work)[0], plain))


def test_numbers_made_from_a_shape_alone():
    def work(mesh):
        return ShardedRandom(mesh, 5).run(
            (0,), torch.rand, [3, 4], dtype=torch.float64, device="cpu"
        )

    first, second = run_on_threads((2,), work)
    assert first.dtype == torch.float64
    assert first.shape == (3, 4)
    assert not torch.equal(first, second)


def test_resumes_from_its_state(tmp_path):
    def work(mesh):
        random, x = ShardedRandom(mesh, 5), torch.ones(9)
        random.run((0,), torch.rand_like, x)
        path = tmp_path / f"{mesh.coordinate[0]}.pt"
        torch.save(random.state_dict(), path)
        expected = [random.run(axes, torch.rand_like, x) for axes in ((0,), ())]
        resumed = ShardedRandom(mesh, 99)
        resumed.load_state_dict(torch.load(path, weights_only=True))
        return all(
            map(
                torch.equal,
                expected,
                [resumed.run(axes, torch.rand_like, x) for axes in ((0,), ())],
            )
        )

    assert all(run_on_threads((2,), work))


def test_state_comes_back_after_an_exception():
    def work(mesh):
        random, before = ShardedRandom(mesh, 5), torch.get_rng_state()
        with pytest.raises(RuntimeError):
            random.run((0,), torch.bernoulli, torch.full((3,), 2.0))
        return torch.equal(torch.get_rng_state(), before)

    def work_of_the_first(mesh):
        return work(mesh) if mesh.coordinate[0] == 0 else True

    assert run_on_threads((2, 1), work_of_the_first)[0]


@pytest.mark.parametrize("mesh_shape", [(2,), (1,)])
def test_a_bookmark_repeats_random_numbers(mesh_shape):
    """As often as wanted, and what is drawn afterwards is as if nothing had been drawn again."""

    def work(mesh):
        random, x = ShardedRandom(mesh, 5), torch.ones(100)

        def draw(times):
            return [random.run((0,), F.dropout, random.run((), F.dropout, x)) for _ in range(times)]

        at_start = random.bookmark()
        with at_start():
            expected = draw(4)
        found = draw(1)
        again = random.bookmark()
        found += draw(2)
        with again():
            repeated = draw(2)
        with again():
            repeated += draw(2)
        found += draw(1)
        assert not torch.equal(found[0], found[1])
        assert all(map(torch.equal, repeated, 2 * found[1:3]))
        return all(map(torch.equal, found, expected))

    assert all(run_on_threads(mesh_shape, work))
