"""One kind of device, the links between devices, and a node's host memory: figures alone."""

from dataclasses import dataclass, replace

# Kinds of ops that multiply and add, for which a device may have efficiencies.
PRODUCT_KINDS = ("matmul", "convolution", "attention", "attention_backward")
DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "int8")


@dataclass(frozen=True)
class Link:
    """A link between two devices, or between two nodes."""

    # seconds per message
    latency: float
    # bytes/s per direction
    bandwidth: float
    # seconds that a collective adds for each further device of a ring, or level of a tree
    hop: float = 0.0


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device. Its figures are those of one device that computes alone."""

    name: str
    memory_bytes: int
    # bytes/s
    memory_bandwidth: float
    # dtype name (`float32`, `bfloat16`, ...) -> FLOP/s
    peak_flops: tuple[tuple[str, float], ...]
    # seconds to start one op
    launch_seconds: float
    # share of peak, 0 to 1, that large matmuls reach (by measurement or experience)
    efficiency: float = 1.0
    # how many times as long an op takes while all devices of the job compute (>= 1; ranks that
    # share CPU cores)
    slowdown: float = 1.0
    # kind of op (`PRODUCT_KINDS`) -> dtype name -> efficiency, if it differs from `efficiency`
    efficiencies: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()
    # processors (SMs) among which a matmul's tiles are divided; 0: tiles are not modelled
    compute_units: int = 0

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU, by its name."""
        return self.name.lower().startswith("cpu")

    def efficiency_of(self, kind: str, dtype: str) -> float:
        """Return the share of `dtype`'s peak that large ops of a kind (`PRODUCT_KINDS`) reach;
        `efficiency` if there is no figure for the two. attention_backward without any has
        attention's.
        """
        by_kind = dict(self.efficiencies)
        if kind == "attention_backward" and kind not in by_kind:
            kind = "attention"
        by_dtype = dict(by_kind.get(kind, ()))
        return by_dtype.get(dtype, self.efficiency)


@dataclass(frozen=True)
class Host:
    """A node's host memory, to which parameters with their optimizer state, and activations, may
    be offloaded.
    """

    # bytes/s per direction between each device and host memory (PCIe, NVLink-C2C)
    link_bandwidth: float
    # bytes of the node's memory that may be used; all of its devices share them
    memory_bytes: float
    # bytes/s of the node's cores; all of its devices share them
    memory_bandwidth: float

    def share(self, num_devices: int) -> "Host":
        """Return the memory and bandwidth of one of `num_devices` devices that share the host
        equally.
        """
        return replace(
            self,
            memory_bytes=self.memory_bytes / num_devices,
            memory_bandwidth=self.memory_bandwidth / num_devices,
        )
