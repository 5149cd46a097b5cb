"""Plans: where a model's sequence is split, and where it is put together again.

A plan is a dictionary from module paths to what happens there: "" is the model itself, a path is dotted, and one "*"
stands for every child of a ModuleList. A dictionary of inputs splits the module's arguments, by parameter name, or its
outputs, by index; outputs are gathered by a SequenceParallelOutput. Lists stand for tuples and lists of tensors, None
in them for a tensor that is left whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module, ModuleList

from ..arch.modules import named_parts, parameters_of, unwrapped
from ..core.errors import SettingError, nearest
from ..core.interop import CP_PLAN, SP_PLAN, declared_plans


@dataclass(frozen=True)
class SequenceParallelInput:
    """A tensor of which each rank takes its part."""

    split_dim: int
    expected_dims: int | None = None
    """Number of dimensions the tensor must have; any other number is an error."""
    split_output: bool = False
    """Whether to split an output of the module (the key is its index) rather than an argument."""
    auto_pad: bool = False
    """Accepted as in other libraries, and needed for nothing: lengths that do not divide evenly are not padded."""
    is_optional: bool = False
    """Leave a tensor with another number of dimensions whole. diffusers' own plans rely on that."""


@dataclass(frozen=True)
class SequenceParallelPartialInput:
    """A tensor that holds text and then image tokens: the text stays whole, each rank takes its part of the image."""

    split_dim: int
    text_len_source: str | int
    """The number of text tokens; or the parameter that holds it: an int, or the text itself, whose tokens are counted
    along dimension 1, or along dimension 0 if it has only two."""
    expected_dims: int | None = None
    split_output: bool = False
    text_first: bool = True
    """False if the image comes before the text."""


@dataclass(frozen=True)
class SequenceParallelOutput:
    """A tensor whose parts are put together again."""

    gather_dim: int
    expected_dims: int | None = None


AnyInput = SequenceParallelInput | SequenceParallelPartialInput
InputTree = Any
"""An input, None, or a list or dictionary of these: the structure of an argument."""
SequenceParallelModelPlan = dict[str, Any]


@dataclass(frozen=True)
class Placement:
    """What a plan does at one module."""

    path: str
    key: str
    """The path as written in the plan, with "*"."""
    module: Module
    inputs: Mapping[str, InputTree] = field(default_factory=dict)
    """By parameter."""
    returned: Mapping[int, InputTree] = field(default_factory=dict)
    """By index of the output to split."""
    outputs: tuple[SequenceParallelOutput | None, ...] = ()


def invalid(message: str) -> SettingError:
    """The error for a plan that is malformed, or does not fit the model."""
    return SettingError(message, param="plan")


def validate_plan(plan: Any) -> SequenceParallelModelPlan:
    """The plan itself, if it is valid."""
    if not isinstance(plan, dict) or not plan:
        raise invalid(f"A plan is a dictionary of module paths with at least one entry; not {plan!r}.")
    for path, entry in plan.items():
        if not isinstance(path, str) or path.count("*") > 1:
            raise invalid(f"The keys of a plan are module paths with at most one '*'; not {path!r}.")
        if isinstance(entry, dict):
            for key, spec in entry.items():
                _check_inputs(path, key, spec)
        elif not all(isinstance(part, SequenceParallelOutput) or part is None for part in _as_list(entry)):
            raise invalid(
                f"The plan has {entry!r} at {path!r}; expected a dictionary of inputs, a SequenceParallelOutput or a "
                "list of these."
            )
    if not any(isinstance(entry, dict) and entry for entry in plan.values()):
        raise invalid(f"The plan splits nothing: no entry of {', '.join(map(repr, plan))} has inputs.")
    return plan


def place_plan(model: Module, plan: SequenceParallelModelPlan) -> tuple[Placement, ...]:
    """What a plan does at which modules of a model; SettingError for a path or parameter that does not exist."""
    model = unwrapped(model)
    placements = []
    for key, entry in validate_plan(plan).items():
        for path, module in _modules_at(model, key):
            if isinstance(entry, dict):
                inputs = {name: spec for name, spec in entry.items() if isinstance(name, str)}
                returned = {index: spec for index, spec in entry.items() if isinstance(index, int)}
                _check_parameters(path, module, inputs)
                placements.append(Placement(path, key, module, inputs, returned))
            else:
                placements.append(Placement(path, key, module, outputs=tuple(_as_list(entry))))
    return tuple(placements)


def declared_plan(model: Module) -> tuple[str, SequenceParallelModelPlan] | None:
    """The plan that a model comes with, and where it was found: `_sp_plan`, or diffusers' `_cp_plan`."""
    plans = declared_plans(unwrapped(model))
    source = next((name for name in (SP_PLAN, CP_PLAN) if name in plans), None)
    return (source, read_plan(plans[source])) if source else None


def read_plan(plan: Any) -> SequenceParallelModelPlan:
    """A valid plan; what is in classes of diffusers, as in a `_cp_plan`, in ours."""
    return validate_plan(_in_own_classes(plan))


def _in_own_classes(entry: Any) -> Any:
    name = f"{type(entry).__module__}.{type(entry).__name__}"
    if name == "diffusers.models._modeling_parallel.ContextParallelInput":
        return SequenceParallelInput(entry.split_dim, entry.expected_dims, entry.split_output, is_optional=True)
    if name == "diffusers.models._modeling_parallel.ContextParallelOutput":
        return SequenceParallelOutput(entry.gather_dim, entry.expected_dims)
    if isinstance(entry, Mapping):
        return {key: _in_own_classes(part) for key, part in entry.items()}
    return [_in_own_classes(part) for part in entry] if isinstance(entry, (list, tuple)) else entry


def _as_list(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def inputs_in(tree: InputTree) -> Iterator[Any]:
    """All inputs in a tree of them."""
    if not isinstance(tree, (dict, list, tuple)):
        yield tree
        return
    for part in tree.values() if isinstance(tree, dict) else tree:
        if part is not None:
            yield from inputs_in(part)


def _check_inputs(path: str, key: Any, tree: InputTree) -> None:
    if not isinstance(key, (str, int)):
        raise invalid(f"The plan has the key {key!r} at {path!r}; expected a parameter or the index of an output.")
    for spec in inputs_in(tree):
        if not isinstance(spec, AnyInput):
            raise invalid(
                f"The plan has {spec!r} for {key!r} of {path!r}; expected a SequenceParallelInput, a "
                "SequenceParallelPartialInput or a list of these."
            )
        if isinstance(key, int) and not spec.split_output:
            raise invalid(f"Output {key} of {path!r} is split: its entry needs split_output=True.")
        if isinstance(key, str) and spec.split_output:
            raise invalid(f"{key!r} of {path!r} has split_output=True: its key must be the output's index.")


def _modules_at(model: Module, key: str) -> Iterator[tuple[str, Module]]:
    parts, name = named_parts(model), type(model).__name__
    if "*" not in key:
        if key not in parts:
            raise invalid(f"The plan names {key!r}, but {name} has no such module. {nearest(key, parts)}")
        yield key, model.get_submodule(key)
        return
    before, _, after = key.partition("*")
    before = before.rstrip(".")
    container = parts.get(before)
    if not isinstance(container, ModuleList):
        lists = [path for path, part in parts.items() if isinstance(part, ModuleList)]
        found = f"is of type {type(container).__name__}" if container is not None else "does not exist"
        raise invalid(
            f"The plan names {key!r}, but {before!r} of {name} {found}; expected a ModuleList. {nearest(before, lists)}"
        )
    # The members of a list need not be alike: the plan means those that have such a module.
    paths = [f"{before}.{index}{after}" for index in range(len(container))]
    for path in [path for path in paths if path in parts] or paths:
        yield from _modules_at(model, path)


def _check_parameters(path: str, module: Module, inputs: Mapping[str, InputTree]) -> None:
    parameters = parameters_of(module)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    specs = [spec for tree in inputs.values() for spec in inputs_in(tree)]
    sources = [spec.text_len_source for spec in specs if isinstance(spec, SequenceParallelPartialInput)]
    for name in (*inputs, *(source for source in sources if isinstance(source, str))):
        if name not in parameters and not takes_any:
            raise invalid(
                f"The plan names the parameter {name!r} of {path or 'the model'!r}, but {type(module).__name__} has no "
                f"such parameter. {nearest(name, parameters)}"
            )
