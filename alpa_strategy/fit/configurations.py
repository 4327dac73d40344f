"""Configurations of equal stages on equal meshes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """Equal stages on equal meshes."""

    num_stages: int
    num_microbatches: int

    # Of each stage.
    logical_mesh: tuple[int, ...]
    remat: bool

    # Of a named plan, one per mesh axis; (): layouts are solved.
    names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The configuration in words, for errors."""
        mesh = "x".join(map(str, self.logical_mesh))
        stages = "stage" if self.num_stages == 1 else "stages"
        text = f"{self.num_stages} {stages} of {mesh}"
        text += f", {self.num_microbatches} micro-batches"
        return f"{text}, recomputed" if self.remat else text


# The least seconds of a configuration, which no plan of it is below, and the configuration.
Candidate = tuple[float, Configuration]


@dataclass(frozen=True)
class Estimate:
    """A configuration with the seconds of a step that its middle layer suggests."""

    seconds: float
    configuration: Configuration
