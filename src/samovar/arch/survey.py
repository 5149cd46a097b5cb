"""What would Samovar find in this model? Its components, its stacks, and which features it is ready for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from .blocks import Anatomy, find_anatomy
from .components import ModuleDiscovery, role_of, tensor_bytes
from .probe import probe_pipeline
from .skeleton import Modules, read_skeleton


@dataclass(frozen=True)
class ComponentReport:
    """One module of a pipeline."""

    name: str
    role: str
    class_name: str
    num_parameters: int | None = None
    """None where the size depends on a checkpoint that is not there."""
    num_bytes: int | None = None
    anatomy: Anatomy | None = None


@dataclass(frozen=True)
class FeatureReport:
    """Whether a feature can be used, and why."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class ModelReport:
    """What a model is made of and what can be done with it."""

    source: str
    class_name: str
    dtype: str
    components: tuple[ComponentReport, ...]
    features: tuple[FeatureReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def survey(source: str) -> ModelReport:
    """Read a model folder, or a class of diffusers by its name."""
    return report(source, *read_skeleton(source))


def survey_pipeline(pipeline: Any) -> ModelReport:
    """The same for a pipeline, or a bare transformer, that is loaded."""
    name = type(pipeline).__name__
    roles = ModuleDiscovery.discover(pipeline).roles()
    modules: Modules = {n: (type(m), m) for names, found in roles.values() for n, m in zip(names, found, strict=True)}
    if isinstance(pipeline, torch.nn.Module) and find_anatomy(pipeline).stacks:
        modules = {"transformer": (type(pipeline), pipeline)}
    return report(name, name, modules)


def survey_by_running(source: str) -> ModelReport:
    """Load a pipeline folder, run two steps of it, and report what was seen on the way."""
    from diffusers import DiffusionPipeline

    read_skeleton(source)  # Refuses what is no pipeline with a better message, and before weights are read.
    pipeline = DiffusionPipeline.from_pretrained(source)
    pipeline.set_progress_bar_config(disable=True)
    structure = survey_pipeline(pipeline)
    components = tuple(
        replace(part, anatomy=probe_pipeline(pipeline, getattr(pipeline, part.name))) if part.anatomy else part
        for part in structure.components
    )
    return replace(structure, source=source, components=components)


def report(source: str, class_name: str, modules: Modules) -> ModelReport:
    """Components, stacks and features of some modules."""
    components = tuple(_report_component(name, cls, module) for name, (cls, module) in modules.items())
    order = ("denoiser", "encoder", "vae", "resident")
    components = tuple(sorted(components, key=lambda component: order.index(component.role)))
    dtypes = [p.dtype for _, module in modules.values() if module is not None for p in module.parameters()]
    dtype = str(dtypes[0]).removeprefix("torch.") if dtypes else "unknown"
    return ModelReport(source, class_name, dtype, components, tuple(_features(components, modules)))


def _report_component(name: str, cls: type, module: torch.nn.Module | None) -> ComponentReport:
    role = role_of(name.rpartition(".")[2], cls)
    if module is None:
        return ComponentReport(name, role, cls.__name__)
    anatomy = find_anatomy(module) if role == "denoiser" else None
    num_parameters = sum(p.numel() for p in module.parameters())
    return ComponentReport(name, role, cls.__name__, num_parameters, tensor_bytes([module]), anatomy)


def _features(components: tuple[ComponentReport, ...], modules: Modules) -> Iterator[FeatureReport]:
    denoisers = [c for c in components if c.role == "denoiser"]
    stacks = [stack for c in denoisers if c.anatomy for stack in c.anatomy.stacks]
    blocks = sum(len(stack) for stack in stacks)
    leaders = [c.anatomy.leader for c in denoisers if c.anatomy and c.anatomy.leader]
    if stacks:
        found = f"{blocks} blocks in {len(stacks)} stack{'s' if len(stacks) > 1 else ''}"
        yield FeatureReport("step cache", True, f"{found}; a step is judged at {', '.join(leaders)}")
        streamed, whole = sum(stack.num_bytes for stack in stacks), sum(c.num_bytes or 0 for c in denoisers)
        yield FeatureReport(
            "layerwise offload", True, f"{blocks} blocks hold {streamed / max(whole, 1):.0%} of the denoiser"
        )
    else:
        nothing = "no stack of blocks was found; declare one with register_declaration"
        yield FeatureReport("step cache", False, nothing)
        yield FeatureReport("layerwise offload", False, nothing)
    encoders = [c for c in components if c.role == "encoder"]
    if denoisers and encoders:
        yield FeatureReport(
            "model offload", True, f"the denoiser takes turns with {', '.join(c.name for c in encoders)}"
        )
    else:
        yield FeatureReport("model offload", False, "nothing takes turns: a denoiser and an encoder are needed")
    planned = [name for name, (cls, _) in modules.items() if "_sp_plan" in dir(cls) or getattr(cls, "_cp_plan", None)]
    if planned:
        yield FeatureReport("sequence parallel", True, f"the plan comes with {', '.join(planned)}")
    elif stacks:
        yield FeatureReport("sequence parallel", True, "a plan is derived from the stacks and checked before use")
    else:
        yield FeatureReport("sequence parallel", False, "there is no plan, and no stack to derive one from")
