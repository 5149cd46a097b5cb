"""What a model is built of and which features it can use, read without weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch

from ..arch.blocks import Anatomy, Coverage, coverage, find_anatomy
from ..arch.components import Role
from ..arch.modules import main_dtype, tensor_bytes, unwrapped
from ..arch.quantised import as_stored
from ..arch.skeleton import Part, Parts, loaded_parts, read_skeleton
from ..core.interop import declared_plans
from ..core.quantisers import quantised_as


@dataclass(frozen=True)
class ComponentReport:
    """One module of a pipeline."""

    name: str
    role: Role
    class_name: str
    num_parameters: int | None = None
    """None where the size depends on a checkpoint that was not given."""
    num_bytes: int | None = None
    anatomy: Anatomy | None = None
    coverage: Coverage | None = None
    """How much of it is in blocks."""
    quantization: str | None = None
    """How it is quantised, in a few words; None if it is not."""


@dataclass(frozen=True)
class FeatureReport:
    """Whether a feature can be used, and why."""

    name: str
    works: bool | None
    """None where only a checkpoint can tell."""
    reason: str


@dataclass(frozen=True)
class ModelReport:
    """What a model is made of and which features can be used."""

    source: str
    class_name: str
    dtype: str
    components: tuple[ComponentReport, ...]
    features: tuple[FeatureReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def survey(source: str) -> ModelReport:
    """Read a model folder, or a diffusers class by its name."""
    return _report(source, *read_skeleton(source))


def survey_pipeline(pipeline: Any) -> ModelReport:
    """The same for a loaded pipeline or bare transformer."""
    name = type(unwrapped(pipeline) if isinstance(pipeline, torch.nn.Module) else pipeline).__name__
    return _report(name, name, loaded_parts(pipeline))


def _report(source: str, class_name: str, parts: Parts) -> ModelReport:
    dtypes = (main_dtype(part.module) for part in parts.values() if part.module is not None)
    dtype = str(next(filter(None, dtypes), "unknown")).removeprefix("torch.")
    ordered = sorted(parts.items(), key=lambda item: get_args(Role).index(item[1].role))
    components = tuple(_report_component(name, part) for name, part in ordered)
    return ModelReport(source, class_name, dtype, components, tuple(_features(components, parts)))


def _report_component(name: str, part: Part) -> ComponentReport:
    if part.module is None:
        return ComponentReport(name, part.role, part.cls.__name__)
    anatomy = find_anatomy(part.module) if part.role == "denoiser" else None
    num_parameters, covered = sum(parameter.numel() for parameter in part.module.parameters()), None
    with as_stored({name: part}):
        num_bytes = tensor_bytes([part.module])
        if anatomy and anatomy.stacks:
            stacks = [replace(stack, num_bytes=tensor_bytes(stack.modules(part.module))) for stack in anatomy.stacks]
            anatomy = replace(anatomy, stacks=tuple(stacks))
            covered = coverage(part.module, anatomy)
    kind = part.kind or quantised_as(part.module)
    return ComponentReport(name, part.role, part.cls.__name__, num_parameters, num_bytes, anatomy, covered, kind)


def _features(components: tuple[ComponentReport, ...], parts: Parts) -> Iterator[FeatureReport]:
    denoisers, encoders = ([part for part in components if part.role == role] for role in ("denoiser", "encoder"))
    num_blocks = sum(len(stack) for part in denoisers if part.anatomy for stack in part.anatomy.stacks)
    planned = ", ".join(name for name, part in parts.items() if declared_plans(part.cls))
    forecast = f"steps of {_named(denoisers)} are forecast and corrected" if denoisers else "there is no denoiser"
    yield FeatureReport("step cache", bool(denoisers), forecast)
    unbuilt = ", ".join(part.class_name for part in denoisers if part.num_parameters is None)
    unblocked: tuple[bool | None, str] = False, "no stack of blocks was found; declare one with register_declaration"
    if unbuilt:
        unblocked = None, f"unknown without a checkpoint, which says how {unbuilt} is built; give a model's folder"
    streamed = (True, f"{num_blocks} blocks can be streamed")
    yield FeatureReport("layerwise offload", *(streamed if num_blocks else unblocked))
    takes_turns = bool(denoisers and encoders)
    turns = f"the denoiser takes turns with {_named(encoders)}"
    needs = "a denoiser and an encoder that can take turns are needed"
    yield FeatureReport("model offload", takes_turns, turns if takes_turns else needs)
    source = f"comes with {planned}" if planned else "is derived from the stacks and checked before use"
    split = (True, f"a plan {source}")
    yield FeatureReport("sequence parallel", *(split if planned or num_blocks else unblocked))


def _named(parts: Iterable[ComponentReport]) -> str:
    return ", ".join(part.name for part in parts)
