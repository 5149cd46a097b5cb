"""What would Samovar find in this model? Its components, its stacks, and which features it is ready for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from ..arch.blocks import Anatomy, find_anatomy
from ..arch.components import Role
from ..arch.coverage import Coverage, coverage
from ..arch.modules import tensor_bytes, unwrapped
from ..arch.skeleton import Part, Parts, loaded_parts, read_skeleton
from ..errors import ModelError
from ..other_libraries import declared_plans, quantization
from .probe import probe_pipeline


@dataclass(frozen=True)
class ComponentReport:
    """One module of a pipeline."""

    name: str
    role: Role
    class_name: str
    num_parameters: int | None = None
    """None where the size depends on a checkpoint that is not there."""
    num_bytes: int | None = None
    anatomy: Anatomy | None = None
    coverage: Coverage | None = None
    """How much of it its blocks hold."""


@dataclass(frozen=True)
class FeatureReport:
    """Whether a feature can be used, and why."""

    name: str
    works: bool | None
    """None where a checkpoint must be there to tell."""
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
    name = type(unwrapped(pipeline) if isinstance(pipeline, torch.nn.Module) else pipeline).__name__
    return report(name, name, loaded_parts(pipeline))


def survey_by_running(source: str) -> ModelReport:
    """Load a pipeline folder, run two steps of it, and report what was seen on the way."""
    folder = Path(source).expanduser()
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{source!r} cannot be run: a local folder that holds a whole pipeline, with a model_index.json, was "
            "expected. Give one (hf download NAME --local-dir FOLDER), or read it without running it."
        )
    pipeline = _load(folder)
    parts = loaded_parts(pipeline)
    structure = report(source, type(pipeline).__name__, parts)
    components = _probed(pipeline, parts, structure.components)
    return replace(structure, components=components)


def _load(folder: Path) -> Any:
    import diffusers
    import transformers

    for logging in (transformers.utils.logging, diffusers.utils.logging):
        logging.disable_progress_bar()  # Theirs are for people who load models by hand.
    _, parts = read_skeleton(str(folder))  # Refuses what is broken with a better message, before weights are read.
    dtypes = [dtype for part in sorted(parts.values(), key=_place) for dtype in _dtypes(part)]
    try:
        with warnings.catch_warnings():
            # diffusers 0.38 knows this name alone, and later ones warn that there is a new one.
            warnings.filterwarnings("ignore", ".*torch_dtype.* is deprecated", FutureWarning)
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                str(folder), torch_dtype=dtypes[0] if dtypes else None
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"The pipeline in {folder} could not be loaded: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _probed(pipeline: Any, parts: Parts, components: tuple[ComponentReport, ...]) -> tuple[ComponentReport, ...]:
    """The components with what two steps show of each denoiser; one that they do not call stays as it is."""
    probed: list[ComponentReport] = []
    problems: list[ModelError] = []
    for component in components:
        module = parts[component.name].module
        if component.anatomy and component.anatomy.stacks and module is not None:
            try:
                anatomy = probe_pipeline(pipeline, module)
                component = replace(component, anatomy=anatomy, coverage=coverage(module, anatomy))
            except ModelError as error:
                problems.append(error)
        probed.append(component)
    if problems and all(component in components for component in probed):
        raise problems[0]
    return tuple(probed)


def report(source: str, class_name: str, parts: Parts) -> ModelReport:
    """Components, stacks and features of some modules."""
    dtypes = [str(dtype).removeprefix("torch.") for part in parts.values() for dtype in _dtypes(part)]
    components = tuple(
        _report_component(name, part) for name, part in sorted(parts.items(), key=lambda i: _place(i[1]))
    )
    features = tuple(_features(components, parts))
    return ModelReport(source, class_name, dtypes[0] if dtypes else "unknown", components, features)


def _place(part: Part) -> int:
    return get_args(Role).index(part.role)


def _dtypes(part: Part) -> Iterator[torch.dtype]:
    return (parameter.dtype for parameter in part.module.parameters()) if part.module is not None else iter(())


def _report_component(name: str, part: Part) -> ComponentReport:
    if part.module is None:
        return ComponentReport(name, part.role, part.cls.__name__)
    anatomy = find_anatomy(part.module) if part.role == "denoiser" else None
    num_parameters = sum(p.numel() for p in part.module.parameters())
    num_bytes = tensor_bytes([part.module])
    covered = coverage(part.module, anatomy) if anatomy and anatomy.stacks else None
    return ComponentReport(name, part.role, part.cls.__name__, num_parameters, num_bytes, anatomy, covered)


def _features(components: tuple[ComponentReport, ...], parts: Parts) -> Iterator[FeatureReport]:
    denoisers = [c for c in components if c.role == "denoiser"]
    stacks = [stack for c in denoisers if c.anatomy for stack in c.anatomy.stacks]
    unbuilt = [c.class_name for c in denoisers if c.num_parameters is None]
    blocks = sum(len(stack) for stack in stacks)
    judged = [(c.name, c.anatomy.leader) for c in denoisers if c.anatomy and c.anatomy.leader]
    leaders = [f"{name}.{leader}" if len(denoisers) > 1 else leader for name, leader in judged]
    unknown = f"not known without a checkpoint, which says how {', '.join(unbuilt)} is built; give a model's folder"
    quantised = _quantised(parts)
    if stacks:
        found = f"{blocks} blocks in {len(stacks)} stack{'s' if len(stacks) > 1 else ''}"
        yield FeatureReport("step cache", True, f"{found}; a step is judged at {', '.join(leaders)}")
        streamed, whole = sum(stack.num_bytes for stack in stacks), sum(c.num_bytes or 0 for c in denoisers)
        held = f"{blocks} blocks hold {streamed / max(whole, 1):.0%} of what denoises"
        yield FeatureReport("layerwise offload", not quantised, quantised or held)
    else:
        nothing = "no stack of blocks was found; declare one with register_declaration"
        for name in ("step cache", "layerwise offload"):
            yield FeatureReport(name, None, unknown) if unbuilt else FeatureReport(name, False, nothing)
    encoders = [c for c in components if c.role == "encoder"]
    if denoisers and encoders:
        turns = f"the denoiser takes turns with {', '.join(c.name for c in encoders)}"
        yield FeatureReport("model offload", not quantised, quantised or turns)
    else:
        yield FeatureReport("model offload", False, "nothing takes turns: a denoiser and an encoder are needed")
    planned = [n for n, part in parts.items() if declared_plans(part.cls)]
    if planned:
        yield FeatureReport("sequence parallel", True, f"the plan comes with {', '.join(planned)}")
    elif stacks:
        yield FeatureReport("sequence parallel", True, "a plan is derived from the stacks and checked before use")
    elif unbuilt:
        yield FeatureReport("sequence parallel", None, unknown)
    else:
        yield FeatureReport("sequence parallel", False, "there is no plan, and no stack to derive one from")


def _quantised(parts: Parts) -> str:
    """Why the components cannot all be offloaded: quantised tensors are more than their memory."""
    methods = {name: quantization(part.module) for name, part in parts.items() if part.module is not None}
    found = [f"{name} ({method})" for name, method in methods.items() if method]
    return f"quantised weights cannot be moved: {', '.join(found)}; leave them out with exclude" if found else ""
