"""One run of a model under a Trainer, with everything recorded that a plan must not change.

`record` runs on every rank; the reference is the same call with `strategy=None`: a plain
single-process Trainer whose loader yields the global batch in the ranks' order.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from models import MODELS
from quiet import QUIET
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from alpa_strategy.ir.plan import modes_text

SAMPLES_PER_STEP = 8


class Rows(Dataset):
    """The rows of one long batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        leaves = torch.utils._pytree.tree_leaves(batch)
        self.length = leaves[0].shape[0]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda t: t[index], self.batch)


class Recorder(pl.Callback):
    """Losses, true (whole) gradients and logged metrics of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        store = getattr(trainer.strategy, "store", None)
        results = {}
        for name, parameter in pl_module.named_parameters():
            grad = (
                parameter.grad.to_dense()
                if parameter.grad is not None
                else torch.zeros_like(parameter)
            )
            results[name] = (grad if store is None else store.gather_like(parameter, grad)).clone()
        self.gradients.append(results)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.losses.append(_mean_over_ranks(trainer, outputs["loss"]))
        metrics = trainer.callback_metrics
        self.metrics.append({name: _mean_over_ranks(trainer, metrics[name]) for name in metrics})


def _mean_over_ranks(trainer: pl.Trainer, value: torch.Tensor) -> float:
    """Return the mean of a number that is each rank's own: of its own batch."""
    return float(trainer.strategy.reduce(value.detach().clone().double(), reduce_op="mean"))


def record(model_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """`record_model` of one of `models.MODELS`."""
    return record_model(MODELS[model_name], *args, **kwargs)


def record_model(
    model_class: Callable[..., Any],
    model_kwargs: dict[str, Any],
    strategy_kwargs: dict[str, Any] | None,
    steps: int = 5,
    world_size: int = 1,
    clip: float | None = None,
    accumulate: int = 1,
    root: str = ".",
    precision: str = "64-true",
    num_microbatches: int = 1,
    samples: int = SAMPLES_PER_STEP,
) -> dict[str, Any]:
    """Train for `steps` optimizer steps on this rank, and return what was logged and planned.

    Args:
        model_class, model_kwargs: make the module.
        strategy_kwargs: options of AlpaStrategy, `batch_scope="global"` unless they say otherwise;
            None: the plain Trainer on the global batches.
        steps: optimizer steps.
        clip: largest norm of the gradients.
        accumulate: `accumulate_grad_batches`.
        root: `default_root_dir`.
        precision: of the Trainer.
        num_microbatches: plain Trainer only: gradient accumulation over that many micro-batches of
            every global batch, the reference if statistics are those of a micro-batch. Lightning
            divides their losses by their number: they add up.
        samples: of all ranks in a step.

    Returns:
        Losses, gradients and metrics of every step, the final state, and fields of the plan.
    """
    strategy_kwargs = _one_device_contract(strategy_kwargs)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    num_samples = samples * steps * accumulate
    model, rows = _model_and_rows(model_class, model_kwargs, num_samples, dtype)
    recorder = Recorder()
    parallel = _parallel_arguments(strategy_kwargs, world_size)
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=1,
        accelerator="cpu",
        precision=precision,
        callbacks=[recorder],
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate * num_microbatches,
        default_root_dir=root,
        **QUIET,
        **parallel,
    )
    loader = _loader(Rows(rows), strategy_kwargs, world_size, num_microbatches, samples)
    trainer.fit(model, loader)
    losses = torch.tensor(recorder.losses, dtype=torch.float64).view(-1, num_microbatches)
    return {
        "losses": losses.sum(1).tolist(),
        "gradients": recorder.gradients,
        "metrics": recorder.metrics,
        "state": {k: v.detach().clone() for k, v in model.state_dict().items()},
        **_plan_fields(getattr(trainer.strategy, "plan", None)),
    }


def _one_device_contract(strategy_kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return options with `batch_scope="global"`: by default numbers are DDP's (test_ranks.py)."""
    if strategy_kwargs is None:
        return None
    return {"batch_scope": "global", **strategy_kwargs}


def _model_and_rows(
    model_class: Callable[..., Any], model_kwargs: dict[str, Any], num_samples: int, dtype: Any
) -> tuple[Any, Any]:
    """Make the module and `num_samples` samples with `dtype` as the default dtype."""
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(7)
        model = model_class(**model_kwargs)
        return model, model.example_batch(num_samples, torch.Generator().manual_seed(3))
    finally:
        torch.set_default_dtype(torch.float32)


def _parallel_arguments(strategy_kwargs: dict[str, Any] | None, world_size: int) -> dict[str, Any]:
    """Return the Trainer's `devices` and `strategy`; without options those of one device."""
    if strategy_kwargs is None:
        return {"devices": 1}
    from alpa_strategy import AlpaStrategy

    return {"devices": world_size, "strategy": AlpaStrategy(**strategy_kwargs)}


def _loader(
    data: Dataset,
    strategy_kwargs: dict[str, Any] | None,
    world_size: int,
    num_microbatches: int,
    samples: int,
) -> DataLoader:
    """Return this rank's loader; arguments are those of `record_model`."""
    if strategy_kwargs is None:
        batches = []
        for batch in _global_batches(len(data), world_size, samples):
            for index in range(num_microbatches):
                batches.append(_part(batch, num_microbatches, index))
        return DataLoader(data, batch_sampler=batches)
    if strategy_kwargs.get("batch_scope") == "global":
        # In the order of the reference, unless the ranks cannot share the samples.
        num_parts = 1 if samples % world_size else world_size
        return DataLoader(data, batch_sampler=_global_batches(len(data), num_parts, samples))
    # a sampler of its own, because that of the Trainer would shuffle
    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=samples // world_size, sampler=sampler)


def _plan_fields(plan: Any) -> dict[str, Any]:
    """Return the fields of a plan that tests compare; empty ones without a plan."""
    if plan is None:
        return {
            "modes": {},
            "pipeline": None,
            "strategies": {},
            "recomputed": (),
            "mesh": None,
            "notes": (),
            "plan": None,
        }
    stage = plan.stages[0]
    return {
        "modes": {n: modes_text(p.modes) for n, p in stage.parameter_plans.items()},
        "pipeline": (len(plan.stages), plan.num_microbatches, plan.schedule),
        "strategies": stage.strategies,
        "recomputed": stage.recomputed,
        "mesh": stage.logical_mesh,
        "notes": plan.notes,
        "plan": plan.to_dict(),
    }


def _global_batches(num_samples: int, world_size: int, size: int) -> list[list[int]]:
    """Index lists of the global batches in the order that DistributedSampler gives to `world_size`
    ranks.
    """
    per_rank = size // world_size
    batches = []
    for start in range(0, num_samples, size):
        batches.append(
            [start + r + world_size * i for r in range(world_size) for i in range(per_rank)]
        )
    return batches


def _part(batch: list[int], num_microbatches: int, m: int) -> list[int]:
    """The m-th micro-batch: neighbouring samples, which are whole ranks' where ranks have some."""
    size = len(batch) // num_microbatches
    return batch[m * size : (m + 1) * size]


def assert_trains_as_plain(
    run: dict[str, Any],
    scope: str,
    world_size: int,
    has_batch_norm: bool,
    plain: Callable[[int, int], dict[str, Any]],
    tolerance: float = 1e-9,
    samples: int = SAMPLES_PER_STEP,
) -> None:
    """Assert that a run has the numbers of the plain Trainer.

    Under `batch_scope="global"` these are one device's on the full batch. Otherwise they are DDP's:
    one device's that accumulates gradients over the ranks' batches. BatchNorm's statistics are
    those of a micro-batch, unless that has all samples of some ranks.

    Args:
        run: of `record_model`.
        scope: "global" or "rank".
        world_size: ranks of the run.
        has_batch_norm: whether the model has BatchNorm.
        plain: makes the plain Trainer's run, called with the number of ranks whose samples it
            takes one after the other, and of the parts that it accumulates gradients over.
        samples: of all ranks in a step.
    """
    num_parts = world_size if scope == "rank" else 1
    num_microbatches = run["pipeline"][1]
    has_whole_ranks = scope == "rank" and world_size % num_microbatches == 0
    if has_batch_norm and not has_whole_ranks:
        num_parts *= num_microbatches
    num_ranks = 1 if samples % world_size else world_size
    reference = plain(num_ranks, num_parts)
    if num_parts > 1:
        # The plain Trainer logs the last part.
        reference = {**reference, "metrics": run["metrics"]}
    if has_batch_norm and scope == "rank":
        # Rank 0's samples update buffers, test_ranks.py compares them; here all parts do.
        reference = {**reference, "state": {**reference["state"], **_statistics(run["state"])}}
    assert_same(run, reference, tolerance)


def _statistics(state: dict[str, Any]) -> dict[str, Any]:
    """Return BatchNorm's buffers of a state dict."""
    suffixes = ("running_mean", "running_var", "num_batches_tracked")
    return {name: value for name, value in state.items() if name.endswith(suffixes)}


def assert_same(run: dict[str, Any], reference: dict[str, Any], tolerance: float = 1e-9) -> None:
    """Losses, gradients of every step, metrics, weights and buffers agree to `tolerance` relative
    to their scale.
    """
    assert len(run["losses"]) == len(reference["losses"])
    losses = (torch.tensor(r["losses"], dtype=torch.float64) for r in (run, reference))
    torch.testing.assert_close(*losses, rtol=tolerance, atol=0)
    for step, (mine, theirs) in enumerate(
        zip(run["gradients"], reference["gradients"], strict=True)
    ):
        for name, expected in theirs.items():
            _close(mine[name], expected, tolerance, f"gradient of {name} at step {step}")
    for mine, theirs in zip(run["metrics"], reference["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        for key, expected in theirs.items():
            assert abs(mine[key] - expected) <= tolerance * max(1.0, abs(expected)), (
                key,
                mine[key],
                expected,
            )
    assert run["state"].keys() == reference["state"].keys()
    for name, expected in reference["state"].items():
        # Adam makes steps of rounding errors where a gradient is zero (the bias of a key): a tenth
        # of lr is a weight.
        _close(run["state"][name], expected, tolerance, f"final {name}", floor=1e-3)


def _close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str, floor: float = 1e-6
) -> None:
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    error = (actual.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), floor)
    assert error <= tolerance * scale, f"{what}: error {error:.3e} at scale {scale:.3e}"
