"""Plans: where a model's sequence is split, and where it is put together again.

A plan is a dictionary from module paths to what happens there: "" is the model itself, a path is dotted, and one "*"
stands for every member of a list. A dictionary of inputs splits the module's arguments, by parameter name, or its
outputs, by index; outputs are gathered by a SequenceParallelOutput. Lists stand for tuples and lists of tensors, None
in them for a tensor that is left whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

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
    arguments: Mapping[str, InputTree] = field(default_factory=dict)
    """What is split, by parameter."""
    outputs: Mapping[int, Any] = field(default_factory=dict)
    """What is split or gathered, by index."""
    gathers: bool = False


def invalid(message: str) -> SettingError:
    """The error for a plan that is malformed, or does not fit the model."""
    return SettingError(message, param="plan")


def read_plan(plan: Any) -> SequenceParallelModelPlan:
    """A valid plan; what is in classes of diffusers, as in a `_cp_plan`, in ours."""
    if not isinstance(plan, Mapping) or not plan:
        raise invalid(f"A plan is a dictionary of module paths with at least one entry; not {plan!r}.")
    read = {path: _read_entry(path, entry) for path, entry in plan.items()}
    if not any(isinstance(entry, dict) and entry for entry in read.values()):
        raise invalid(f"The plan splits nothing: no entry of {', '.join(map(repr, plan))} has inputs.")
    return read


def _read_entry(path: Any, entry: Any) -> Any:
    if not isinstance(path, str) or path.count("*") > 1:
        raise invalid(f"The keys of a plan are module paths with at most one '*'; not {path!r}.")
    read = tree_map(_in_own_class, entry)
    if isinstance(read, dict):
        for key, tree in read.items():
            _check_inputs(path, key, tree)
    elif not all(isinstance(part, SequenceParallelOutput) or part is None for part in _as_list(read)):
        raise invalid(
            f"The plan has {entry!r} at {path!r}; expected a dictionary of inputs, a SequenceParallelOutput or a list "
            "of these."
        )
    return read


def _in_own_class(spec: Any) -> Any:
    name = f"{type(spec).__module__}.{type(spec).__name__}"
    if name == "diffusers.models._modeling_parallel.ContextParallelInput":
        return SequenceParallelInput(spec.split_dim, spec.expected_dims, spec.split_output, is_optional=True)
    if name == "diffusers.models._modeling_parallel.ContextParallelOutput":
        return SequenceParallelOutput(spec.gather_dim, spec.expected_dims)
    return spec


def _check_inputs(path: str, key: Any, tree: InputTree) -> None:
    if not isinstance(key, (str, int)):
        raise invalid(f"The plan has the key {key!r} at {path!r}; expected a parameter or the index of an output.")
    for spec in inputs_in(tree):
        if not isinstance(spec, (SequenceParallelInput, SequenceParallelPartialInput)):
            raise invalid(
                f"The plan has {spec!r} for {key!r} of {path!r}; expected a SequenceParallelInput, a "
                "SequenceParallelPartialInput or a list of these."
            )
        if spec.split_output != isinstance(key, int):
            raise invalid(
                f"The plan has {spec!r} for {key!r} of {path!r}. What splits an output has split_output=True, and the "
                "output's index as its key."
            )


def inputs_in(tree: InputTree) -> list[Any]:
    """All inputs in a tree of them."""
    return [spec for spec in tree_leaves(tree) if spec is not None]


def place_plan(model: Module, plan: SequenceParallelModelPlan) -> tuple[Placement, ...]:
    """What a plan does at which modules of a model; SettingError for a path or parameter that does not exist."""
    model = unwrapped(model)
    placements = []
    for key, entry in read_plan(plan).items():
        gathers = not isinstance(entry, dict)
        entry = dict(enumerate(_as_list(entry))) if gathers else entry
        arguments = {name: tree for name, tree in entry.items() if isinstance(name, str)}
        outputs = {index: tree for index, tree in entry.items() if isinstance(index, int)}
        for path, module in _modules_at(model, key).items():
            _check_parameters(path, module, arguments)
            placements.append(Placement(path, key, module, arguments, outputs, gathers))
    return tuple(placements)


def declared_plan(model: Module) -> tuple[str, SequenceParallelModelPlan] | None:
    """The plan that a model comes with, and where it was found: `_sp_plan`, or diffusers' `_cp_plan`."""
    plans = declared_plans(unwrapped(model))
    source = next((name for name in (SP_PLAN, CP_PLAN) if name in plans), None)
    return (source, read_plan(plans[source])) if source else None


def _as_list(entry: Any) -> list[Any]:
    return list(entry) if isinstance(entry, (list, tuple)) else [entry]


def _modules_at(model: Module, key: str) -> dict[str, Module]:
    """The modules that a key of a plan names, by path. The members of a list need not be alike: it means those that
    have such a module."""
    parts, pattern = named_parts(model), re.escape(key).replace(r"\*", r"\d+")
    found = {path: model.get_submodule(path) for path in parts if re.fullmatch(pattern, path)}
    if not found:
        starred = {re.sub(r"\b\d+\b", "*", path) for path in parts} - parts.keys()
        hint = nearest(key, starred if "*" in key else parts)
        raise invalid(f"The plan names {key!r}, but {type(model).__name__} has no such module. {hint}")
    return found


def _check_parameters(path: str, module: Module, arguments: Mapping[str, InputTree]) -> None:
    parameters = parameters_of(module)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    specs = [spec for spec in inputs_in(arguments) if isinstance(spec, SequenceParallelPartialInput)]
    for name in (*arguments, *(spec.text_len_source for spec in specs)):
        if isinstance(name, str) and name not in parameters and not takes_any:
            raise invalid(
                f"The plan names the parameter {name!r} of {path or 'the model'!r}, but {type(module).__name__} has no "
                f"such parameter. {nearest(name, parameters)}"
            )
