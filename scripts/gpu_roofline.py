"""What a device reaches: matmuls, attention, pointwise ops, copies and launches, as figures
for cost curves.

    python scripts/gpu_roofline.py --device cuda --out roofline.json

Part of `scripts/gpu_exam.py`. Every figure is the median of several timed batches of calls after a
warm-up; on a GPU
they are timed by events, so that a call shorter than its launch shows the launch: what an eager
program pays.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

Figures = dict[str, float | int | str | bool]
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Timer:
    """Seconds of a call on `device`, in batches long enough that neither clock nor synchronisation
    counts.
    """

    def __init__(self, device: torch.device, batch_seconds: float) -> None:
        self.device, self._batch_seconds = device, batch_seconds

    def seconds(self, fn: Callable[[], object], batches: int = 5) -> float:
        """Median over `batches` of the mean time of a call."""
        for _ in range(3):
            fn()
        once = max(self._timed(fn, 1), 1e-7)
        count = max(1, min(1000, math.ceil(self._batch_seconds / once)))
        return statistics.median(self._timed(fn, count) / count for _ in range(batches))

    def host_seconds(self, fn: Callable[[], object], count: int = 200) -> float:
        """How long the host is busy with one call: few enough calls that the device's queue never
        fills.
        """
        for _ in range(3):
            fn()
        results = []
        for _ in range(5):
            self.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                fn()
            results.append((time.perf_counter() - started) / count)
        self.synchronize()
        return statistics.median(results)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _timed(self, fn: Callable[[], object], count: int) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            for _ in range(count):
                fn()
            return time.perf_counter() - started
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            fn()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def products(timer: Timer, small: bool) -> Iterator[Figures]:
    """FLOP/s of `a @ b`, square and in the shapes of a transformer's layers (8192 tokens)."""
    squares = (256, 512) if small else (256, 512, 1024, 2048, 4096, 8192)
    shapes = [(n, n, n) for n in squares]
    if not small:
        for hidden in (1024, 2048, 4096):
            # qkv, the MLP's two layers, and the gradient of a weight, whose inner dim is the tokens
            shapes += [
                (8192, 3 * hidden, hidden),
                (8192, 4 * hidden, hidden),
                (8192, hidden, 4 * hidden),
            ]
            shapes.append((4 * hidden, hidden, 8192))
        shapes += [(8192, 51200, 1024), (128, 4096, 4096), (1024, 1024, 64)]
    names = ("float32", "bfloat16") if small else tuple(DTYPES)
    for name in names:
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        for m, n, k in shapes:
            a = torch.randn(m, k, device=timer.device).to(DTYPES[name])
            b = torch.randn(n, k, device=timer.device).to(DTYPES[name])
            seconds = timer.seconds(lambda a=a, b=b: F.linear(a, b))
            yield {
                "kind": "matmul",
                "dtype": name,
                "m": m,
                "n": n,
                "k": k,
                **_rate(seconds, 2 * m * n * k),
            }
    torch.backends.cuda.matmul.allow_tf32 = False


def fp8_products(timer: Timer, small: bool) -> Iterator[Figures]:
    """`torch._scaled_mm` where the device has it (compute capability 8.9 and up)."""
    if timer.device.type != "cuda" or torch.cuda.get_device_capability(timer.device) < (8, 9):
        return
    one = torch.ones((), device=timer.device)
    for n in (1024,) if small else (1024, 2048, 4096, 8192):
        a = torch.randn(n, n, device=timer.device).to(torch.float8_e4m3fn)
        b = torch.randn(n, n, device=timer.device).to(torch.float8_e4m3fn).t()
        seconds = timer.seconds(
            lambda a=a, b=b: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
        )
        yield {
            "kind": "matmul",
            "dtype": "float8_e4m3fn",
            "m": n,
            "n": n,
            "k": n,
            **_rate(seconds, 2 * n**3),
        }


def attention(timer: Timer, small: bool) -> Iterator[Figures]:
    """Scaled dot product attention, forward and backward; FLOPs are those that are needed (half
    under a mask).
    """
    dtype = torch.float32 if small else torch.bfloat16
    for length in (128, 256) if small else (512, 1024, 2048, 4096, 8192, 16384):
        for width in (64,) if small else (64, 128):
            for causal in (False, True):
                heads = max(1, min(512, 2**19 // length // 4)) if not small else 2
                # [1, heads, length, width]: heads of several rows of a batch count alike
                q, k, v = (
                    torch.randn(
                        1,
                        heads,
                        length,
                        width,
                        device=timer.device,
                        dtype=dtype,
                        requires_grad=True,
                    )
                    for _ in range(3)
                )
                flops = 4 * heads * length * length * width / (2 if causal else 1)
                with torch.no_grad():
                    forward = timer.seconds(
                        lambda q=q, k=k, v=v, c=causal: F.scaled_dot_product_attention(
                            q, k, v, is_causal=c
                        )
                    )
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
                grad = torch.randn_like(out)
                backward = timer.seconds(
                    lambda o=out, q=q, k=k, v=v, g=grad: torch.autograd.grad(
                        o, (q, k, v), g, retain_graph=True
                    )
                )
                shape = {"length": length, "width": width, "heads": heads, "causal": causal}
                name = str(dtype).removeprefix("torch.")
                yield {"kind": "attention forward", "dtype": name, **shape, **_rate(forward, flops)}
                yield {
                    "kind": "attention backward",
                    "dtype": name,
                    **shape,
                    **_rate(backward, 2.5 * flops),
                }


def pointwise(timer: Timer, small: bool) -> Iterator[Figures]:
    """Bytes/s of ops that are bound by memory: each operand read once, each result written once, as
    the planner counts.

    Sizes from what fits the cache to what does not.
    """
    dtypes = (torch.float32,) if small else (torch.float32, torch.bfloat16)
    ops: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # name -> (op, tensors moved)
        "copy": (torch.clone, 2),
        "add": (lambda x: x + x, 2),
        "gelu": (lambda x: F.gelu(x, approximate="tanh"), 2),
        "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), 2),
        "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), 2),
        "softmax": (lambda x: x.softmax(-1), 2),
        "dropout": (lambda x: F.dropout(x, 0.1), 2),
        "sum": (torch.sum, 1),
    }
    for rows in (256, 1024) if small else (128, 1024, 8192, 65536, 262144):
        for dtype in dtypes:
            x = torch.randn(rows, 1024, device=timer.device).to(dtype)
            for name, (op, moved) in ops.items():
                seconds = timer.seconds(lambda op=op, x=x: op(x))
                num_bytes = moved * x.nbytes
                figures = {
                    "rows": rows,
                    "seconds": seconds,
                    "bytes_per_second": num_bytes / seconds,
                }
                yield {"kind": name, "dtype": str(dtype).removeprefix("torch."), **figures}


def optimizers(timer: Timer, small: bool) -> Iterator[Figures]:
    """AdamW over 300 parameters: seven passes over each element (p, g, m, v read; p, m, v
    written).
    """
    sizes = [2**12 if small else 2**20] * 300
    for fused in (False, True):
        parameters = [torch.zeros(n, device=timer.device, requires_grad=True) for n in sizes]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer = torch.optim.AdamW(
            parameters, **({"fused": True} if fused else {"foreach": True})
        )
        seconds = timer.seconds(optimizer.step, batches=3)
        num_bytes = 7 * 4 * sum(sizes)
        yield {
            "kind": "adamw fused" if fused else "adamw foreach",
            "dtype": "float32",
            "seconds": seconds,
            "bytes_per_second": num_bytes / seconds,
            "host_seconds": timer.host_seconds(optimizer.step, 3),
        }


def launches(timer: Timer, small: bool) -> Iterator[Figures]:
    """Host seconds of an eager call on tensors of eight elements: the op alone, and as autograd
    sees it.
    """
    x = torch.ones(8, device=timer.device)
    y = torch.ones(8, 8, device=timer.device)
    w = torch.ones(8, 8, device=timer.device, requires_grad=True)
    z = torch.ones(8, device=timer.device, requires_grad=True)

    def there_and_back() -> None:
        torch.autograd.grad((z * 2.0).sum(), z)

    calls: dict[str, Callable[[], object]] = {
        "add": lambda: x + x,
        "linear": lambda: F.linear(y, y),
        "linear with graph": lambda: F.linear(y, w),
        "layer_norm with graph": lambda: F.layer_norm(w, (8,)),
        "mul, sum and their backward": there_and_back,
        "empty": lambda: torch.empty(8, device=timer.device),
    }
    for name, call in calls.items():
        yield {"kind": "launch", "what": name, "host_seconds": timer.host_seconds(call)}


def copies(timer: Timer, small: bool) -> Iterator[Figures]:
    """Bytes/s between host and device: what offloading can count on."""
    if timer.device.type != "cuda":
        return
    for megabytes in (1,) if small else (1, 16, 256):
        for pinned in (True, False):
            host = torch.ones(megabytes * 2**18, pin_memory=pinned)
            there = torch.empty_like(host, device=timer.device)
            for name, call in (
                ("host to device", lambda h=host, t=there: t.copy_(h, non_blocking=True)),
                ("device to host", lambda h=host, t=there: h.copy_(t, non_blocking=True)),
            ):
                seconds = timer.seconds(call, batches=3)
                yield {
                    "kind": name,
                    "pinned": pinned,
                    "megabytes": megabytes,
                    "bytes_per_second": host.nbytes / seconds,
                }


def measure(device: torch.device, small: bool) -> Iterator[Figures]:
    """All figures, one by one; what the device cannot do is an entry with `error`."""
    timer = Timer(device, 2e-3 if small else 1e-2)
    for family in (launches, products, fp8_products, attention, pointwise, optimizers, copies):
        try:
            yield from family(timer, small)
        except Exception as error:  # one family must not hide the others
            yield {"kind": family.__name__, "error": f"{type(error).__name__}: {error}"}
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _rate(seconds: float, flops: float) -> Figures:
    return {"seconds": seconds, "flops_per_second": flops / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="roofline.json")
    args = parser.parse_args()
    found = list(measure(torch.device(args.device), args.small))
    Path(args.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
