"""Pins and named plans, as restrictions of the integer program (docs/formulas.md#intra-op).

A named plan (`data`, `zero3`, `tensor`, ...) forbids storage placements of parameters per mesh
axis, or makes the others expensive, so that a model that cannot follow it everywhere gets the
nearest plan. A pinned placement is a hard constraint.
"""

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np

from alpa_strategy.cost.flops import CASTS, is_plain_view, op_base_name
from alpa_strategy.errors import OptionError, PlanError
from alpa_strategy.intra_op.build import IntraOp, TransferLayouts
from alpa_strategy.intra_op.options import ParameterOptions
from alpa_strategy.intra_op.problem import Transfer, evaluate
from alpa_strategy.ir.graph import ParameterInput, StepGraph
from alpa_strategy.ir.op import TensorMeta
from alpa_strategy.ir.optimizer_info import OptimizerInfo
from alpa_strategy.ir.plan import ParameterMode, ParameterPlan, Storage, modes_text, parse_modes
from alpa_strategy.options import PlanOptions

RUNNING = "the running plan"
# Seconds per byte of memory: decides between layouts that cost the same.
TIE = 1e-15
# An error lists this many names of parameters.
MAX_LISTED_NAMES = 3


def restrict(
    intra: IntraOp,
    options: PlanOptions,
    optimizer: OptimizerInfo,
    pinned: Mapping[str, ParameterPlan] | None = None,
) -> IntraOp:
    """Return the same problem with the user's restrictions in it; `intra` itself if there are none.

    Strategies that a pin, the optimizer or a named plan (`parallel=`) forbids cost infinity. Others
    that the named plan avoids get a penalty: they are taken only if no others are possible.

    Args:
        pinned: layouts of parameters that must be kept, by name (steps that share a running plan's
            parameters).

    Raises:
        PlanError: no strategy of a parameter meets its pin (the message has the modes that exist),
            or none is left under the options and for the optimizer.
        OptionError: a pattern of `placements` matches no parameter.
    """
    # The named plan of every mesh axis.
    names = options.parallel
    if isinstance(names, str):
        names = (names,) * len(intra.mesh.shape)
    modes = pinned_modes(intra, options, pinned or {})
    is_pinned = bool(modes or options.completes or options.kept_whole)
    is_named = set(names) != {"auto"}
    if optimizer.may_step_shards and not is_pinned and not is_named:
        return intra

    # Added for each strategy that a named plan does not want. It is several times the seconds of a
    # step in which every device computes everything, so that such strategies are avoided if
    # possible, and yet of the size of real costs, which solvers need.
    penalty = 4.0 * evaluate(intra.problem, [0] * len(intra.problem.choices))[0]
    choices = list(intra.problem.choices)
    for index, parameter in enumerate(intra.step.parameters):
        parameter_options = intra.parameters[index]
        cost = choices[index].cost.copy()
        if parameter.name in modes:
            allowed = _meets_pin(intra, parameter, parameter_options, *modes[parameter.name])
        else:
            is_kept_full = parameter.name in options.kept_whole
            for axis, name in enumerate(names):
                axis_name = "data" if is_kept_full else name
                cost += _mode_penalty(axis_name, parameter.meta, parameter_options, axis, penalty)
            # A named plan forbids by infinite cost.
            allowed = np.isfinite(cost)
            if not optimizer.may_step_shards:
                allowed &= np.array([plan.is_unsharded for plan in parameter_options.plans])
        if options.completes:
            allowed &= _completes_in_backward(parameter_options)
        if not allowed.any():
            raise _nothing_left(parameter.name, options, optimizer)
        cost[~allowed] = np.inf
        choices[index] = replace(choices[index], cost=cost)

    transfers = _penalized_transfers(intra, names, modes.keys(), penalty)
    problem = replace(intra.problem, choices=tuple(choices), transfers=transfers)
    return replace(intra, problem=problem, unrestricted=intra.unrestricted or intra.problem)


def _meets_pin(
    intra: IntraOp,
    parameter: ParameterInput,
    parameter_options: ParameterOptions,
    wanted: tuple[ParameterMode, ...],
    origin: str,
) -> np.ndarray:
    """Return [option] whether an option of a parameter has the pinned modes.

    Args:
        wanted: the pinned mode per mesh axis.
        origin: of the pin, for the error. A pin of the running plan (`RUNNING`) is met exactly.

    Raises:
        PlanError: no option has them.
    """
    exactly = origin == RUNNING
    allowed = np.array([_meets(plan.modes, wanted, exactly) for plan in parameter_options.plans])
    if allowed.any():
        return allowed

    wanted_modes = ParameterPlan(wanted, parameter.num_segments).module_modes
    shape = list(parameter.module_shape or parameter.meta.shape)
    existing = [f"'{modes_text(plan.module_modes)}'" for plan in parameter_options.plans]
    raise PlanError(
        f"{origin} asks for modes '{modes_text(wanted_modes)}' of parameter {parameter.name!r}"
        f" (shape {shape}), which it cannot have on a logical mesh of {intra.mesh.shape}",
        f"use one of: {', '.join(existing)}",
    )


def _completes_in_backward(parameter_options: ParameterOptions) -> np.ndarray:
    """Return for each option of a parameter whether no gradient is left to be summed once per
    step.
    """
    once_per_step = Storage.REPLICATE, Storage.GATHER_ONCE
    completes = []
    for plan in parameter_options.plans:
        completes.append(not any(mode.storage in once_per_step for mode in plan.modes))
    return np.array(completes)


def _penalized_transfers(
    intra: IntraOp, names: Sequence[str], pinned: Collection[str], penalty: float
) -> tuple[Transfer, ...]:
    """Return the transfers with penalties for uses of parameters that named plans do not want.

    Args:
        names: the named plan of every mesh axis.
        pinned: names of parameters whose placements are pinned: no named plan is about them.
    """
    transfers = list(intra.problem.transfers)
    parameter_of_value = derived_values(intra.step)
    # Those of equal layers have the same arrays, and get the same.
    penalties: dict[Hashable, np.ndarray] = {}
    costs: dict[tuple[int, int], np.ndarray] = {}
    for index, layouts in enumerate(intra.transfers):
        parameter = parameter_of_value.get(layouts.value)
        if parameter is None or parameter.name in pinned:
            continue
        uses = intra.step.consumers.get(layouts.value, ())
        is_cast_only = bool(uses) and all(
            parameter_of_value.keys() >= set(intra.step.ops[op].results) for op, _ in uses
        )
        key = is_cast_only, parameter.meta, id(layouts.sources), id(layouts.targets)
        if key not in penalties:
            extra = np.zeros_like(transfers[index].cost)
            for axis, name in enumerate(names):
                # A parameter that only a cast reads is cast as it is stored; a named plan gathers
                # the result of the cast.
                use_name = name
                if is_cast_only and name != "auto":
                    use_name = "tensor"
                extra += _use_penalty(use_name, parameter.meta, layouts, axis, penalty)
            penalties[key] = extra
        pair = id(transfers[index].cost), id(penalties[key])
        if pair not in costs:
            costs[pair] = transfers[index].cost + penalties[key]
        transfers[index] = replace(transfers[index], cost=costs[pair])
    return tuple(transfers)


def least_of_equals(intra: IntraOp) -> IntraOp:
    """Return the same problem in which, of layouts with the same cost, those with fewer bytes are
    better: each byte costs `TIE` seconds.

    That is for layouts of parameters, and of values that come from other stages or go to them.
    """
    indices = set(range(len(intra.parameters)))
    for boundary in (*intra.received.values(), *intra.sent.values()):
        indices.add(boundary.choice)
    return intra.with_costs({index: TIE * intra.problem.choices[index].memory for index in indices})


def derived_values(step: StepGraph) -> dict[int, ParameterInput]:
    """Return the values that are a parameter, or a parameter in another dtype or shape (autocast's
    casts, views), with that parameter.

    Rules of a named plan for uses of a parameter are for uses of these values, too.
    """
    parameter_of_value = {parameter.value: parameter for parameter in step.parameters}
    for op in step.ops:
        keeps_elements = op_base_name(op.call) in CASTS or is_plain_view(op.call)
        if len(op.operands) == 1 and keeps_elements:
            parameter = parameter_of_value.get(op.operands[0])
            if parameter is not None:
                parameter_of_value.update(dict.fromkeys(op.results, parameter))
    return parameter_of_value


def _nothing_left(name: str, options: PlanOptions, optimizer: OptimizerInfo) -> PlanError:
    """Return the error if options and optimizer allow no way to store parameter `name`."""
    if not optimizer.may_step_shards:
        return PlanError(
            f"{optimizer.why_in_full}: parameter {name!r} must stay unsharded, and"
            f" parallel={options.parallel!r} stores it in shards",
            "use an optimizer that updates one parameter at a time, such as AdamW or Muon, or"
            ' parallel="data"',
        )
    return PlanError(
        f"no way to store parameter {name!r} is left under parallel={options.parallel!r}",
        "relax `parallel` or pin this parameter with `placements`",
    )


def _meets(
    modes: tuple[ParameterMode, ...], wanted: tuple[ParameterMode, ...], exactly: bool
) -> bool:
    """Whether `modes` are those of a pin; a user's `R` means any mode that stores the full
    parameter, unless `exactly`.
    """
    for mode, wanted_mode in zip(modes, wanted, strict=True):
        storages = wanted_mode.storage, mode.storage
        is_full = not exactly and storages == (Storage.INVARIANT, Storage.REPLICATE)
        if mode is not wanted_mode and not is_full:
            return False
    return True


def pinned_modes(
    intra: IntraOp, options: PlanOptions, pinned: Mapping[str, ParameterPlan]
) -> dict[str, tuple[tuple[ParameterMode, ...], str]]:
    """Return the pinned modes of parameters by name, each with the option that pins them.

    Later patterns override earlier ones, and `pinned` all of them.

    Raises:
        OptionError: a pattern matches no parameter.
    """
    modes_of: dict[str, tuple[tuple[ParameterMode, ...], str]] = {}
    segmented = {p.name for p in intra.step.parameters if p.num_segments > 1}
    names = {alias: p.name for p in intra.step.parameters for alias in p.names}
    for pattern, text in options.placements:
        # As many as the mesh has axes (`allowed_shapes`).
        modes = parse_modes(text)
        for name in matching(pattern, names):
            step_modes = modes
            if name in segmented:
                # The step sees the segments as one more dim in front.
                step_modes = tuple(mode.shifted(1) for mode in modes)
            modes_of[name] = step_modes, f"placements[{pattern!r}]"
    for alias, plan in pinned.items():
        if alias in names:
            modes_of[names[alias]] = plan.modes, RUNNING
    return modes_of


def matching(pattern: str, names: Mapping[str, str], option: str = "placements") -> list[str]:
    """Return the names of the parameters that a pattern of an option matches.

    Args:
        names: parameters' names by alias.

    Raises:
        OptionError: there are none.
    """
    matched = [name for alias, name in names.items() if fnmatchcase(alias, pattern)]
    if not matched:
        raise OptionError(
            f"{option}[{pattern!r}] matches no parameter",
            "use a glob of parameter names such as "
            + ", ".join(map(repr, list(names)[:MAX_LISTED_NAMES])),
        )
    return matched


def _mode_penalty(
    name: str, meta: TensorMeta, options: ParameterOptions, axis: int, penalty: float
) -> np.ndarray:
    """Return [option] the seconds that the named plan of one axis adds to an option of a parameter;
    inf forbids it.

    Args:
        name: `auto`, `tensor`, `data`, `zero1`, `zero2` or `zero3`.
        axis: of the mesh.
        penalty: seconds of what `tensor` avoids.
    """
    letters = [plan.modes[axis].storage.value[0] for plan in options.plans]
    if name == "auto":
        return np.zeros(len(letters))

    shard_letter = "G" if meta.requires_grad else "S"
    can_shard = shard_letter in letters
    if name == "tensor":
        # Not every matrix can be split by its op (a position table that is indexed by position,
        # for example): full ones are expensive, not forbidden.
        is_splittable = len(meta.shape) > 1 and can_shard
        full_seconds = penalty if is_splittable else 0.0
        seconds = {"S": 0.0, "R": full_seconds, "G": np.inf}
        return np.array([seconds[letter] for letter in letters])

    wanted = "R"
    if can_shard and name == "zero3":
        wanted = "S"
    elif can_shard and name in ("zero1", "zero2") and meta.requires_grad:
        wanted = "G"
    is_wanted = np.array([letter == wanted for letter in letters])
    return np.where(is_wanted, 0.0, np.inf)


def _use_penalty(
    name: str, meta: TensorMeta, layouts: TransferLayouts, axis: int, penalty: float
) -> np.ndarray:
    """Return [source, target] the seconds that the named plan of one axis adds to resharding a
    stored parameter to the layout of a use. Args: as of `_mode_penalty`.
    """
    stored_dims = [layout[axis].shard_dim for layout in layouts.sources]
    used_dims = [layout[axis].shard_dim for layout in layouts.targets]
    is_expensive = np.zeros((len(stored_dims), len(used_dims)), dtype=bool)
    for i, stored in enumerate(stored_dims):
        for j, used in enumerate(used_dims):
            if name == "tensor":
                # The shard is used as it is stored.
                may_gather = len(meta.shape) < 2 and stored is not None
                is_expensive[i, j] = used != stored and not may_gather
            elif name != "auto":
                # Data parallelism and ZeRO use full parameters.
                is_expensive[i, j] = used is not None
    return np.where(is_expensive, penalty, 0.0)
