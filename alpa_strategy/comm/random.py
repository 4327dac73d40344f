"""Random ops on a mesh: different numbers on each shard, the same on replicas, from one seed.

ATen's random ops draw from the device's default generator. So there is one generator state per set
of sharding axes, which is swapped into the default generator around each op. Other users of the
default generator are not affected.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from alpa_strategy.comm.mesh import MeshComm

T = TypeVar("T")
Replay = Callable[[], AbstractContextManager[None]]

# A process has one default generator: ranks that are threads (in tests) must take turns with it.
_default_generator_lock = threading.Lock()


class ShardedRandom:
    """Runs random ops for one device of a mesh.

    Devices that differ in a coordinate of the op's `random_axes` draw independent numbers, the
    others the same. All devices must call `run` in the same order with the same `random_axes`, as
    they do when they run one program. On a mesh of one device the default generator itself is used:
    bitwise the numbers that the plain module draws.

    Args:
        mesh: with this device's coordinate.
        seed: the run's seed, the same on all devices.
        own_stream: whether the default generator is never used (by stages of a pipeline, which
            would all draw the same numbers).
    """

    def __init__(self, mesh: MeshComm, seed: int, own_stream: bool = False) -> None:
        self._coordinate = tuple(mesh.coordinate)
        self._seed = seed
        is_one_device = all(size == 1 for size in mesh.shape)
        self._uses_default = is_one_device and not own_stream
        # (random_axes, device type) -> generator state
        self._states: dict[tuple[tuple[int, ...], str], Tensor] = {}

    def run(
        self, random_axes: tuple[int, ...], fn: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T:
        """Return `fn(*args, **kwargs)`, run with the generator state of `random_axes`."""
        if self._uses_default:
            return fn(*args, **kwargs)
        generators = _generators(args)
        with _default_generator_lock:
            outside = [generator.get_state() for generator in generators]
            try:
                for generator in generators:
                    generator.set_state(self._state(random_axes, generator))
                result = fn(*args, **kwargs)
                for generator in generators:
                    self._states[random_axes, generator.device.type] = generator.get_state()
            finally:
                for generator, state in zip(generators, outside, strict=True):
                    generator.set_state(state)
        return result

    def _state(self, random_axes: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Return the state of the stream of values that differ along `random_axes` of the mesh and
        are the same along the others: the last one, or a first one made of the seed and this
        device's coordinates.

        Args:
            generator: of the device on which they are drawn.
        """
        state = self._states.get((random_axes, generator.device.type))
        if state is None:
            coordinates = tuple(self._coordinate[axis] for axis in random_axes)
            fresh = torch.Generator(generator.device)
            # 63 well-mixed bits, the same in every process and Python version.
            mixed = hashlib.sha256(repr((self._seed, random_axes, coordinates)).encode()).digest()
            fresh.manual_seed(int.from_bytes(mixed[:8], "little") >> 1)
            state = fresh.get_state()
        return state

    def bookmark(self) -> Replay:
        """Remember the present state of the generators.

        Returns:
            A function that makes a context in which the numbers drawn from here on are drawn once
            more. After it, the generators continue as if it had not been.
        """
        at_start = dict(self._states)
        alone = (
            [(generator, generator.get_state()) for generator in _generators(())]
            if self._uses_default
            else []
        )

        @contextmanager
        def again() -> Iterator[None]:
            now, self._states = self._states, dict(at_start)
            outside = [generator.get_state() for generator, _ in alone]
            for generator, state in alone:
                generator.set_state(state)
            try:
                yield
            finally:
                self._states = now
                for (generator, _), state in zip(alone, outside, strict=True):
                    generator.set_state(state)

        return again

    def state_dict(self) -> dict[str, Any]:
        """This device's generators, for a checkpoint: tensors, numbers and strings only."""
        states = {
            f"{','.join(map(str, axes))}/{device}": state.clone()
            for (axes, device), state in self._states.items()
        }
        return {"seed": self._seed, "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the seed and the streams to those of `state`, which this rank's `state_dict` returned
        on the same mesh and device.
        """
        self._seed = state["seed"]
        self._states = {}
        for key, value in state["states"].items():
            axes, _, device = key.partition("/")
            self._states[tuple(int(axis) for axis in axes.split(",") if axis), device] = (
                value.cpu().clone()
            )


def _generators(args: tuple[Any, ...]) -> list[torch.Generator]:
    """Return the default generators that an op on `args` may draw from: that of the first tensor's
    device, or all in use when no argument is a tensor.
    """
    for arg in args:
        if isinstance(arg, Tensor):
            return [_default_generator(arg.device)]
    if torch.cuda.is_initialized():
        return [torch.default_generator, _default_generator(torch.device("cuda"))]
    return [torch.default_generator]


def _default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator of the device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
