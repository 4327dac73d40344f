"""Optimizers are judged by experiment."""

import pytest
import torch
from optimizers.paper_optimizers import MuonPerHead, Prodigy

from alpa_strategy.errors import AlpaError
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.planner.optimizer_info import (
    inspect_optimizer,
    optimizer_info_of,
    wants_sparse_gradients,
)
from alpa_strategy.planner.optimizer_reads import reads_of

OPTIMIZERS = [
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "SGD",
]
KINDS = [getattr(torch.optim, name) for name in OPTIMIZERS]


def parameter() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 6))]


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_known_element_wise_optimizers_pass_the_experiment(kind: type) -> None:
    assert inspect_optimizer(kind(parameter(), lr=0.1)).element_wise


@pytest.mark.parametrize(
    "kind", [*KINDS, torch.optim.LBFGS, torch.optim.SparseAdam], ids=lambda k: k.__name__
)
def test_sparse_gradients_alone_are_wanted_by_sparse_adam(kind: type) -> None:
    settings = (
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True} if kind is torch.optim.SGD else {}
    )
    assert wants_sparse_gradients(kind(parameter(), lr=0.1, **settings)) is (
        kind is torch.optim.SparseAdam
    )


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        (lambda p: torch.optim.AdamW(p, lr=0.1), 8.0),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), 12.0),
        (lambda p: torch.optim.SGD(p, lr=0.1), 0.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4.0),
    ],
)
def test_state_bytes_follow_the_users_settings(optimizer, state_bytes: float) -> None:
    assert inspect_optimizer([optimizer(parameter())]).state_bytes == state_bytes


class NormScaled(torch.optim.Optimizer):
    """LARS-like: the step is scaled by the unsharded parameter's norm, so shards would differ."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.norm() * p.grad


class JointlyScaled(NormScaled):
    """The step is scaled by the norm of all parameters: those of other pipeline stages would be
    missing.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.nn.utils.get_total_norm(group["params"])
            for p in group["params"]:
                p -= group["lr"] * norm * p.grad


class Signed(NormScaled):
    """Element-wise, unknown to the table."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad.sign()


class Secretive(Signed):
    """Cannot be rebuilt from its defaults, but copied."""

    def __init__(self, params, secret: object) -> None:
        super().__init__(params, lr=0.1)
        self.hidden = secret


class Closed(Signed):
    """Cannot be copied: it would step the original's parameters."""

    def __init__(self, params, secret: object) -> None:
        super().__init__(params, lr=0.1)
        self.stepped = lambda: params

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.stepped():
            p -= 0.1


def test_unknown_optimizers_are_judged_by_experiment() -> None:
    assert not inspect_optimizer(NormScaled(parameter(), 0.1)).element_wise
    assert inspect_optimizer(Signed(parameter(), 0.1)).element_wise
    assert inspect_optimizer(Secretive(parameter(), object())).element_wise
    assert not inspect_optimizer(Secretive(parameter(), torch.nn.Linear(2, 2))).element_wise
    assert not inspect_optimizer(torch.optim.LBFGS(parameter())).element_wise
    assert not inspect_optimizer(torch.optim.Adafactor(parameter())).element_wise


class CountsGradients(Signed):
    """Keeps the largest gradient of all parameters, and uses it much later."""

    largest = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.largest = max(self.largest, float(p.grad.abs().max()))


@pytest.mark.parametrize("d0", [1e-3, 1e-9])
def test_sums_over_all_parameters_show_where_steps_are_tiny(d0: float) -> None:
    assert not inspect_optimizer(Prodigy(parameter(), d0=d0)).may_step_shards
    assert not inspect_optimizer(CountsGradients(parameter(), 0.1)).may_step_shards


@pytest.mark.parametrize(("rows", "heads"), [(36, 12), (2304, 36)])
def test_what_steps_some_shapes_only_is_tried_in_the_parameters_own(rows: int, heads: int) -> None:
    projection = [torch.nn.Parameter(torch.ones(rows, 6))]
    groups = [{"params": projection, "num_heads": heads}]
    info = inspect_optimizer(MuonPerHead(groups), torch.nn.ParameterList(projection))
    assert (info.element_wise, info.parameter_wise) == (False, True)
    assert info.full_updates[0][1].flops > 0


def test_trying_never_changes_the_optimizers_own_parameters() -> None:
    (weight,) = parameter()
    before = weight.detach().clone()
    info = inspect_optimizer(Closed([weight], object()))
    assert not info.may_step_shards
    assert "steps the parameters of the original" in info.problem
    assert torch.equal(weight, before)


@pytest.mark.parametrize("factor", [0.0, 1e-17])
def test_a_warmup_that_begins_near_nothing_hides_no_norms(factor: float) -> None:
    scaled, signed = NormScaled(parameter(), 0.1), Signed(parameter(), 0.1)
    for optimizer in (scaled, signed):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: factor)
    assert not inspect_optimizer(scaled).element_wise
    assert inspect_optimizer(signed).element_wise


class Still(NormScaled):
    """Begins at a later step, whatever the rate."""

    @torch.no_grad()
    def step(self, closure=None): ...


def test_what_moves_nothing_is_not_known() -> None:
    assert not inspect_optimizer(Still(parameter(), 0.1)).element_wise


class Sometimes(NormScaled):
    """Scales by the norm where a flag says so, in convolutions, or what is large."""

    def __init__(self, params, lr: float, scales: bool = False) -> None:
        super().__init__(params, lr)
        self.defaults["scales"] = scales
        for group in self.param_groups:
            group.setdefault("scales", scales)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                scales = (
                    group["scales"] or p.dim() == 4 or (p.grad.norm() > 100 and group["lr"] < 0.1)
                )
                p -= group["lr"] * (p.norm() if scales else 1.0) * p.grad


class ScheduleFree(torch.optim.SGD):
    """With weights of its own for evaluation, which hooks request."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_evaluation_weights_need_the_full_state() -> None:
    info = inspect_optimizer(ScheduleFree(parameter(), lr=0.1))
    assert (info.element_wise, info.parameter_wise) == (False, False)


def test_every_kind_of_group_and_parameter_is_tried() -> None:
    kernel = [torch.nn.Parameter(torch.ones(4, 6, 1, 3))]
    flagged = [{"params": parameter()}, {"params": parameter(), "scales": True}]
    assert inspect_optimizer(Sometimes(parameter(), lr=0.1)).element_wise
    assert not inspect_optimizer(Sometimes(flagged, lr=0.1)).element_wise
    assert not inspect_optimizer(Sometimes([*parameter(), *kernel], lr=0.1)).element_wise
    assert not inspect_optimizer(Sometimes(parameter(), lr=0.01)).element_wise


class Projecting(torch.optim.SGD):
    """Like GaLore: in groups that give a rank, which has no default, gradients are projected."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"] if "rank" in group else ():
                basis = torch.linalg.svd(p.grad, full_matrices=False)[0][:, : group["rank"]]
                p.grad = basis @ (basis.T @ p.grad)
        return super().step(closure)


def test_settings_of_a_group_alone_are_tried() -> None:
    assert inspect_optimizer(Projecting(parameter(), lr=0.1)).element_wise
    assert inspect_optimizer(
        Projecting([{"params": parameter(), "name": "all"}], lr=0.1)
    ).element_wise
    groups = [{"params": parameter()}, {"params": parameter(), "rank": 2}]
    assert not inspect_optimizer(Projecting(groups, lr=0.1)).element_wise


def test_inspection_leaves_optimizer_and_random_state_alone() -> None:
    optimizer = torch.optim.AdamW(parameter(), lr=0.1)
    before = torch.get_rng_state()
    inspect_optimizer(optimizer)
    assert not optimizer.state
    assert torch.equal(before, torch.get_rng_state())


class Batched(NormScaled):
    """Scales every matrix of a batch by its own norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                norm = torch.linalg.matrix_norm(p, keepdim=True) if p.dim() > 1 else 1.0
                p -= group["lr"] * norm * p.grad


def test_dims_that_may_be_sharded_are_found_for_each_parameter() -> None:
    batch, matrix = torch.nn.Parameter(torch.ones(4, 6, 5)), torch.nn.Parameter(torch.ones(4, 6))
    vector = torch.nn.Parameter(torch.ones(8))
    reads = reads_of(Batched([batch, matrix, vector], lr=0.1))
    assert reads[batch].free_dims == {0}
    assert reads[matrix].free_dims == set()
    assert reads[vector].is_element_wise
    assert all(each.is_parameter_wise for each in reads.values())


def test_what_steps_full_parameters_one_by_one_may_be_sharded() -> None:
    muon = inspect_optimizer(torch.optim.Muon(parameter()))
    assert not muon.element_wise
    assert muon.may_step_shards
    assert not inspect_optimizer(JointlyScaled(parameter(), 0.1)).may_step_shards
    assert not inspect_optimizer(torch.optim.LBFGS(parameter())).may_step_shards


def test_several_optimizers_are_one_clear_error() -> None:
    with pytest.raises(AlpaError, match="2 optimizers"):
        inspect_optimizer(
            [torch.optim.SGD(parameter(), lr=0.1), torch.optim.SGD(parameter(), lr=0.1)]
        )


def test_info_of_a_module_without_a_trainer() -> None:
    from models import MLP

    assert optimizer_info_of(MLP(optimizer="sgd")) == OptimizerInfo(
        4.0, True, "SGD", moved_bytes=32.0
    )
    model = MLP()
    model.configure_optimizers = lambda: model.trainer.optimizers
    assert optimizer_info_of(model) == OptimizerInfo(name="Adam (assumed)")


@pytest.mark.parametrize(
    ("kind", "expected"), [(NormScaled, True), (Signed, True), (JointlyScaled, False)]
)
def test_whether_parameters_are_updated_one_by_one(kind: type, expected: bool) -> None:
    assert inspect_optimizer(kind(parameter(), lr=0.1)).parameter_wise is expected
    assert not inspect_optimizer(torch.optim.LBFGS(parameter())).parameter_wise


@pytest.mark.parametrize(("dtype", "state_bytes"), [(torch.float64, 16.0), (torch.bfloat16, 4.0)])
def test_state_bytes_follow_the_dtype_of_the_parameters(
    dtype: torch.dtype, state_bytes: float
) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 6, dtype=dtype))]
    assert inspect_optimizer(torch.optim.AdamW(parameters)).state_bytes == state_bytes


class Counting(torch.optim.Optimizer):
    """Element-wise, with a rate that falls with every call of `step`."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] / self.num_steps * p.grad


class Counted(torch.optim.SGD):
    """Counts its steps and those of its copies."""

    num_steps = 0

    def step(self, closure=None):
        Counted.num_steps += 1
        return super().step(closure)


def test_settings_that_were_tried_are_not_tried_again():
    """But for other settings, and for settings that are more than plain values."""

    def steps_of_a_trial(**settings) -> int:
        before = Counted.num_steps
        reads_of(Counted([torch.nn.Parameter(torch.zeros(4, 6))], **settings))
        return Counted.num_steps - before

    assert steps_of_a_trial(lr=0.1) > 0
    assert steps_of_a_trial(lr=0.1) == 0
    assert steps_of_a_trial(lr=0.1, momentum=0.9) > 0
    assert steps_of_a_trial(lr=torch.tensor(0.1)) > 0
    assert steps_of_a_trial(lr=torch.tensor(0.1)) > 0
