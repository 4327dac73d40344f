"""Pins and named plans: restrictions of the one space, never another code path
(docs/formulas.md#intra-op).

A named plan (`data`, `zero3`, `tensor`, ...) forbids parameter modes per mesh axis, or makes what
it does not want dear, so that a model that cannot follow it everywhere gets the nearest plan. A
pinned placement is a hard constraint.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from alpa_strategy.cost.flops import CASTS, is_plain_view, op_base_name
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.intra_op.build import IntraOp, TransferLayouts
from alpa_strategy.intra_op.options import ParameterOptions
from alpa_strategy.intra_op.problem import evaluate
from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan, Storage, modes_text, parse_modes
from alpa_strategy.options import PlanOptions

RUNNING = "the running plan"
TIE = 1e-15  # seconds a byte: decides between what costs the same


def restrict(
    intra: IntraOp,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    pinned: Mapping[str, ParameterPlan] | None = None,
) -> IntraOp:
    """The same problem with the user's restrictions in it.

    Args:
        pinned: parameter name -> plan that must be kept (steps that share a running plan's
            parameters).

    Raises:
        PlanError: a pin that no strategy of the parameter meets, with the modes that exist.
    """
    parallel = options.parallel
    names = (
        (parallel,) * len(intra.mesh.shape) if isinstance(parallel, str) else parallel
    )  # of every mesh axis
    modes = pinned_modes(intra, options, pinned or {})
    if (
        not (modes or options.completes or options.kept_whole)
        and set(names) == {"auto"}
        and optimizer.element_wise
    ):
        return intra
    # For each thing that a named plan does not want: several times a step in which every device
    # does everything, so that it is avoided where possible, and yet of the size of real costs, as
    # solvers like it.
    penalty = 4.0 * evaluate(intra.problem, [0] * len(intra.problem.choices))[0]
    choices = list(intra.problem.choices)
    for index, (parameter, own) in enumerate(
        zip(intra.step.parameters, intra.parameters, strict=True)
    ):
        cost = choices[index].cost.copy()
        if parameter.name in modes:
            wanted, origin = modes[parameter.name]
            allowed = np.array(
                [_meets(plan.modes, wanted, exactly=origin == RUNNING) for plan in own.plans]
            )
            if not allowed.any():
                asked = ParameterPlan(wanted, parameter.num_segments).module_modes
                shape = list(parameter.module_shape or parameter.meta.shape)
                raise PlanError(
                    f"{origin} asks for modes '{modes_text(asked)}' of parameter {parameter.name!r}"
                    f" (shape {shape}), "
                    f"which it cannot have on a logical mesh of {intra.mesh.shape}",
                    "use one of: "
                    + ", ".join(f"'{modes_text(plan.module_modes)}'" for plan in own.plans),
                )
        else:
            for axis, name in enumerate(names):
                name = "data" if parameter.name in options.kept_whole else name
                cost += _mode_penalty(name, parameter.meta, own, axis, penalty)
            # A named plan forbids by infinite cost.
            allowed = np.isfinite(cost)
            if not optimizer.element_wise:
                allowed &= np.array([plan.is_whole for plan in own.plans])
        if options.completes:
            once = Storage.REPLICATE, Storage.GATHER_ONCE  # their gradients are summed once a step
            allowed &= np.array(
                [not any(mode.storage in once for mode in plan.modes) for plan in own.plans]
            )
        if not allowed.any():
            raise _nothing_left(parameter.name, options, optimizer)
        cost[~allowed] = np.inf
        choices[index] = replace(choices[index], cost=cost)
    transfers = list(intra.problem.transfers)
    read_as = derived_values(intra.step)
    for index, layouts in enumerate(intra.transfers):
        read = read_as.get(layouts.value)
        if read is None or read.name in modes:
            continue
        uses = intra.step.consumers.get(layouts.value, ())
        passes_on = bool(uses) and all(
            read_as.keys() >= set(intra.step.ops[op].results) for op, _ in uses
        )
        extra = np.zeros_like(transfers[index].cost)
        for axis, name in enumerate(names):
            # What only passes on to a cast is cast as it is stored, and what a named plan gathers
            # is the cast.
            rule = "tensor" if passes_on and name != "auto" else name
            extra += _use_penalty(rule, read.meta, layouts, axis, penalty)
        transfers[index] = replace(transfers[index], cost=transfers[index].cost + extra)
    problem = replace(intra.problem, choices=tuple(choices), transfers=tuple(transfers))
    return replace(intra, problem=problem, unrestricted=intra.unrestricted or intra.problem)


def least_of_equals(intra: IntraOp) -> IntraOp:
    """The same where, of layouts (parameters', what is handed on) that cost the same, those with
    less are better.
    """
    boundary = {given.choice for given in (*intra.received.values(), *intra.sent.values())}
    given = {
        index: intra.problem.choices[index] for index in (*range(len(intra.parameters)), *boundary)
    }
    return intra.with_costs({index: TIE * choice.memory for index, choice in given.items()})


def derived_values(step: StepGraph) -> dict[int, ParameterInput]:
    """Values that are a parameter, or a parameter in another dtype or shape (autocast's casts,
    views): what a named plan says of a parameter's uses, it says of theirs.
    """
    found = {p.value: p for p in step.parameters}
    for op in step.ops:
        keeps_elements = op_base_name(op.call) in CASTS or is_plain_view(op.call)
        if len(op.operands) == 1 and op.operands[0] in found and keeps_elements:
            found.update(dict.fromkeys(op.results, found[op.operands[0]]))
    return found


def _nothing_left(name: str, options: PlanOptions, optimizer: OptimizerInfo) -> PlanError:
    if not optimizer.element_wise:
        return PlanError(
            f"the optimizer {optimizer.name} does not work element by element, so it needs"
            f" parameter {name!r} whole, "
            f"and parallel={options.parallel!r} stores it in shards",
            'use an element-wise optimizer such as AdamW, or parallel="data"',
        )
    return PlanError(
        f"no way to store parameter {name!r} is left under parallel={options.parallel!r}",
        "relax `parallel` or pin this parameter with `placements`",
    )


def _meets(
    modes: tuple[ParameterMode, ...], wanted: tuple[ParameterMode, ...], exactly: bool
) -> bool:
    """Whether modes are what a pin wants; a user's `R` only says that the parameter is kept
    whole.
    """
    whole = () if exactly else (Storage.INVARIANT, Storage.REPLICATE)
    return all(
        m is w or (w.storage, m.storage) == whole for m, w in zip(modes, wanted, strict=True)
    )


def pinned_modes(
    intra: IntraOp, options: PlanOptions, pinned: Mapping[str, ParameterPlan]
) -> dict[str, tuple[tuple[ParameterMode, ...], str]]:
    """Parameter name -> (modes, who asked). Later patterns win; every pattern must match
    something.
    """
    found: dict[str, tuple[tuple[ParameterMode, ...], str]] = {}
    segmented = {p.name for p in intra.step.parameters if p.num_segments > 1}
    names = {alias: p.name for p in intra.step.parameters for alias in p.names}
    for pattern, text in options.placements:
        wanted = parse_modes(text)  # as many as the mesh has axes (`allowed_shapes`)
        for name in matching(pattern, names):
            in_step = tuple(mode.shifted(1) for mode in wanted) if name in segmented else wanted
            found[name] = in_step, f"placements[{pattern!r}]"
    found.update(
        {names[alias]: (plan.modes, RUNNING) for alias, plan in pinned.items() if alias in names}
    )
    return found


def matching(pattern: str, names: Mapping[str, str], option: str = "placements") -> list[str]:
    """Names of the parameters that a pattern of an option is for; `names`: alias -> name.

    Raises:
        OptionError: there are none.
    """
    matched = [name for alias, name in names.items() if fnmatchcase(alias, pattern)]
    if not matched:
        raise OptionError(
            f"{option}[{pattern!r}] matches no parameter",
            "use a glob of parameter names such as " + ", ".join(repr(n) for n in list(names)[:3]),
        )
    return matched


def _mode_penalty(
    name: str, meta: TensorMeta, own: ParameterOptions, axis: int, penalty: float
) -> np.ndarray:
    """Seconds added to each option of a parameter by the named plan of one axis; inf forbids."""
    letters = [plan.modes[axis].storage.value[0] for plan in own.plans]
    if name == "auto":
        return np.zeros(len(letters))
    can_shard = "G" in letters if meta.requires_grad else "S" in letters
    if name == "tensor":
        # Not every matrix can be split by its op (a position table looked up by rows, say): dear,
        # not forbidden.
        whole = penalty if len(meta.shape) > 1 and can_shard else 0.0
        return np.array([{"S": 0.0, "R": whole, "G": np.inf}[letter] for letter in letters])
    once = "G" if meta.requires_grad else "R"
    wanted = {"data": "R", "zero1": once, "zero2": once, "zero3": "S"}[name] if can_shard else "R"
    return np.array([0.0 if letter == wanted else np.inf for letter in letters])


def _use_penalty(
    name: str, meta: TensorMeta, layouts: TransferLayouts, axis: int, penalty: float
) -> np.ndarray:
    """Seconds added to bringing a stored parameter to a use layout by the named plan of one
    axis.
    """
    stored, used = (
        [layout[axis].shard_dim for layout in each] for each in (layouts.sources, layouts.targets)
    )
    if name == "tensor":  # uses the shard as it is stored
        dear = [[b != a and (len(meta.shape) >= 2 or a is None) for b in used] for a in stored]
    else:  # data parallel and ZeRO use parameters whole
        dear = [[b is not None and name != "auto" for b in used]] * len(stored)
    return np.where(dear, penalty, 0.0)
