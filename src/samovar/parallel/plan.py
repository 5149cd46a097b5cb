"""Where is a model's sequence split, and where is it put together again?

A plan is a dictionary from module paths to what happens there: "" is the model itself, a path is dotted, and
one "*" stands for every child of a ModuleList. A dictionary of inputs splits what the module is called with, by
parameter name, or what it returns, by index; outputs gather what it returns. Lists stand for tuples and lists of
tensors, None in them for what is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..arch.modules import named_parts, parameters_of, unwrapped
from ..errors import SettingError, nearest
from ..other_libraries import CP_PLAN, SP_PLAN, declared_plans


@dataclass(frozen=True)
class SequenceParallelInput:
    """A tensor of which each rank takes its part."""

    split_dim: int
    expected_dims: int | None = None
    """How many dimensions the tensor must have; any other number is an error."""
    split_output: bool = False
    """Whether it is what the module returns, at the index that is its key, and not what it is given."""
    auto_pad: bool = False
    """Give all ranks the same number of rows, for code that needs that; attention leaves the added ones out.
    Lengths that do not divide need no padding."""
    is_optional: bool = False
    """Leave a tensor with another number of dimensions whole. diffusers' own plans count on that."""


@dataclass(frozen=True)
class SequenceParallelPartialInput:
    """A tensor that holds text and then image tokens: text stays whole, each rank takes its part of the image."""

    split_dim: int
    text_len_source: str | int
    """The number of text tokens; or the module's parameter that tells: an int, or the text itself, whose tokens
    are counted along dimension 1, or dimension 0 if it has but two."""
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
"""An input, None, or a list or dictionary of these: the form of an argument."""
SequenceParallelModelPlan = dict[str, Any]


@dataclass(frozen=True)
class Placement:
    """What a plan does at one module."""

    path: str
    key: str
    """The path as the plan has it, with "*"."""
    module: torch.nn.Module
    inputs: Mapping[str, InputTree]
    """By parameter."""
    returned: Mapping[int, InputTree]
    """By index of what the module returns."""
    outputs: tuple[SequenceParallelOutput | None, ...] = ()


def validate_plan(plan: Any) -> SequenceParallelModelPlan:
    """The plan itself, if it is one."""
    if not isinstance(plan, dict) or not plan:
        raise SettingError(f"A plan is a dictionary of module paths with at least one entry; not {plan!r}.")
    for path, entry in plan.items():
        if not isinstance(path, str) or path.count("*") > 1:
            raise SettingError(f"A plan's keys are module paths with at most one '*'; not {path!r}.")
        if isinstance(entry, dict):
            for key, tree in entry.items():
                _check_inputs(path, key, tree)
        elif not all(isinstance(part, SequenceParallelOutput) or part is None for part in _as_list(entry)):
            raise SettingError(
                f"The plan has {entry!r} at {path!r}; a dictionary of inputs, a SequenceParallelOutput or a list of "
                "these was expected."
            )
    if not any(isinstance(entry, dict) and entry for entry in plan.values()):
        raise SettingError(f"The plan splits nothing: no entry of {', '.join(map(repr, plan))} has inputs.")
    return plan


def place_plan(model: torch.nn.Module, plan: SequenceParallelModelPlan) -> tuple[Placement, ...]:
    """What a plan does at which modules of a model; a path or parameter that is not there is refused."""
    model = unwrapped(model)
    placements = []
    for key, entry in validate_plan(plan).items():
        for path, module in _modules_at(model, key):
            if not isinstance(entry, dict):
                placements.append(Placement(path, key, module, {}, {}, tuple(_as_list(entry))))
                continue
            inputs = {name: tree for name, tree in entry.items() if isinstance(name, str)}
            returned = {index: tree for index, tree in entry.items() if isinstance(index, int)}
            _check_parameters(path, module, inputs)
            placements.append(Placement(path, key, module, inputs, returned))
    return tuple(placements)


def declared_plan(model: torch.nn.Module) -> tuple[str, SequenceParallelModelPlan] | None:
    """The plan that a model comes with, and where it was found: `_sp_plan`, or diffusers' `_cp_plan`."""
    plans = declared_plans(unwrapped(model))
    if SP_PLAN in plans:
        return SP_PLAN, validate_plan(plans[SP_PLAN])
    return (CP_PLAN, _from_diffusers(plans[CP_PLAN])) if CP_PLAN in plans else None


def inputs_in(tree: InputTree) -> Iterator[AnyInput]:
    """All inputs in a tree of them."""
    if isinstance(tree, AnyInput):
        yield tree
    elif tree is not None:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from inputs_in(part)


def _from_diffusers(plan: Mapping[str, Any]) -> SequenceParallelModelPlan:
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    def converted(entry: Any) -> Any:
        if isinstance(entry, ContextParallelInput):
            return SequenceParallelInput(entry.split_dim, entry.expected_dims, entry.split_output, is_optional=True)
        if isinstance(entry, ContextParallelOutput):
            return SequenceParallelOutput(entry.gather_dim, entry.expected_dims)
        if isinstance(entry, dict):
            return {key: converted(part) for key, part in entry.items()}
        return [converted(part) for part in entry] if isinstance(entry, (list, tuple)) else entry

    return validate_plan({path: converted(entry) for path, entry in plan.items()})


def _as_list(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _check_inputs(path: str, key: Any, tree: InputTree) -> None:
    if not isinstance(key, (str, int)):
        raise SettingError(f"The plan has the key {key!r} at {path!r}; a parameter or an output's index was expected.")
    if isinstance(tree, AnyInput):
        if isinstance(key, int) and not tree.split_output:
            raise SettingError(f"Output {key} of {path!r} is split: its entry needs split_output=True.")
        if isinstance(key, str) and tree.split_output:
            raise SettingError(f"{key!r} of {path!r} has split_output=True: its key must be the output's index.")
    elif isinstance(tree, (list, tuple)) or (isinstance(tree, dict) and isinstance(key, str)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            if part is not None:
                _check_inputs(path, key, part)
    else:
        raise SettingError(
            f"The plan has {tree!r} for {key!r} of {path!r}; a SequenceParallelInput, a SequenceParallelPartialInput "
            "or a list of these was expected."
        )


def _modules_at(model: torch.nn.Module, key: str) -> Iterator[tuple[str, torch.nn.Module]]:
    parts = named_parts(model)
    if "*" not in key:
        if key not in parts:
            raise SettingError(f"The plan names {key!r}, but {type(model).__name__} has no such module. "
                               f"{nearest(key, parts)}")  # fmt: skip
        yield key, model.get_submodule(key)
        return
    before, _, after = key.partition("*")
    before = before.rstrip(".")
    container = parts.get(before)
    if not isinstance(container, torch.nn.ModuleList):
        lists = [path for path, part in parts.items() if isinstance(part, torch.nn.ModuleList)]
        what = f"a {type(container).__name__}" if container is not None else "no module"
        raise SettingError(
            f"The plan names {key!r}, but {before!r} of {type(model).__name__} is {what}; a ModuleList was expected. "
            f"{nearest(before, lists)}"
        )
    # Not all of a list need be alike: what some of them have is meant of those.
    paths = [f"{before}.{index}{after}" for index in range(len(container))]
    known = [path for path in paths if path in parts]
    for path in known or paths:
        yield from _modules_at(model, path)


def _check_parameters(path: str, module: torch.nn.Module, inputs: Mapping[str, InputTree]) -> None:
    parameters = parameters_of(module)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    sources = [
        part.text_len_source
        for tree in inputs.values()
        for part in inputs_in(tree)
        if isinstance(part, SequenceParallelPartialInput) and isinstance(part.text_len_source, str)
    ]
    for name in (*inputs, *sources):
        if name not in parameters and not takes_any:
            raise SettingError(
                f"The plan names the parameter {name!r} of {path or 'the model'!r}, but {type(module).__name__} takes "
                f"no such one. {nearest(name, parameters)}"
            )
