"""What would Samovar find in this model? Its components, its stacks, and which features can be used."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from ..arch.blocks import Anatomy, find_anatomy
from ..arch.components import ModuleDiscovery, Role, is_denoiser_itself
from ..arch.coverage import Coverage, coverage
from ..arch.modules import tensor_bytes, unwrapped
from ..arch.skeleton import Part, Parts, lone_part, read_skeleton
from ..errors import ModelError
from ..other_libraries import declared_plans
from .probe import probe_pipeline


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
    return _report(name, name, _loaded_parts(pipeline))


def survey_by_running(source: str) -> ModelReport:
    """Load a pipeline folder, run two steps, and report what was seen on the way."""
    folder = Path(source).expanduser()
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{source!r} cannot be run: a local folder that holds a whole pipeline, with a model_index.json, was "
            "expected. Give one (hf download NAME --local-dir FOLDER), or inspect it without running it."
        )
    pipeline = _load(folder)
    parts = _loaded_parts(pipeline)
    structure = _report(source, type(pipeline).__name__, parts)
    return replace(structure, components=_probed(pipeline, parts, structure.components))


def _load(folder: Path) -> Any:
    import diffusers
    import transformers

    for logging in (transformers.utils.logging, diffusers.utils.logging):
        logging.disable_progress_bar()  # Theirs are for people who load models by hand.
    _, parts = read_skeleton(str(folder))  # Refuses a broken folder with a better message, before weights are read.
    dtypes = _dtypes(sorted(parts.values(), key=_place))
    try:
        with warnings.catch_warnings():
            # diffusers 0.38 knows only this name; later versions warn about it.
            warnings.filterwarnings("ignore", ".*torch_dtype.* is deprecated", FutureWarning)
            pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder), torch_dtype=next(dtypes, None))
    except (OSError, ValueError) as error:
        raise ModelError(f"The pipeline in {folder} could not be loaded: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _loaded_parts(pipeline: Any) -> Parts:
    if is_denoiser_itself(pipeline):
        return lone_part(type(unwrapped(pipeline)), unwrapped(pipeline))
    found = ModuleDiscovery.discover(pipeline).roles().items()
    return {
        name: Part(role, type(unwrapped(module)), module)
        for role, (names, modules) in found
        for name, module in zip(names, modules, strict=True)
    }


def _probed(pipeline: Any, parts: Parts, components: tuple[ComponentReport, ...]) -> tuple[ComponentReport, ...]:
    """The components, with what two steps show of each denoiser that they call."""
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


def _report(source: str, class_name: str, parts: Parts) -> ModelReport:
    dtype = next((str(dtype).removeprefix("torch.") for dtype in _dtypes(parts.values())), "unknown")
    ordered = sorted(parts.items(), key=lambda item: _place(item[1]))
    components = tuple(_report_component(name, part) for name, part in ordered)
    return ModelReport(source, class_name, dtype, components, tuple(_features(components, parts)))


def _place(part: Part) -> int:
    return get_args(Role).index(part.role)


def _dtypes(parts: Iterable[Part]) -> Iterator[torch.dtype]:
    return (parameter.dtype for part in parts if part.module is not None for parameter in part.module.parameters())


def _report_component(name: str, part: Part) -> ComponentReport:
    if part.module is None:
        return ComponentReport(name, part.role, part.cls.__name__)
    anatomy = find_anatomy(part.module) if part.role == "denoiser" else None
    num_parameters = sum(p.numel() for p in part.module.parameters())
    covered = coverage(part.module, anatomy) if anatomy and anatomy.stacks else None
    num_bytes = tensor_bytes([part.module])
    return ComponentReport(name, part.role, part.cls.__name__, num_parameters, num_bytes, anatomy, covered)


def _features(components: tuple[ComponentReport, ...], parts: Parts) -> Iterator[FeatureReport]:
    denoisers = [c for c in components if c.role == "denoiser"]
    encoders = ", ".join(c.name for c in components if c.role == "encoder")
    stacks = [stack for c in denoisers if c.anatomy for stack in c.anatomy.stacks]
    unbuilt = ", ".join(c.class_name for c in denoisers if c.num_parameters is None)
    planned = [name for name, part in parts.items() if declared_plans(part.cls)]
    unknown = f"unknown without a checkpoint, which says how {unbuilt} is built; give a model's folder"

    def without_stacks(name: str, reason: str) -> FeatureReport:
        return FeatureReport(name, None, unknown) if unbuilt else FeatureReport(name, False, reason)

    if stacks:
        blocks, plural = sum(map(len, stacks)), "s" if len(stacks) > 1 else ""
        judged = [(c.name, c.anatomy.leader) for c in denoisers if c.anatomy and c.anatomy.leader]
        leaders = ", ".join(f"{name}.{leader}" if len(denoisers) > 1 else leader for name, leader in judged)
        found = f"{blocks} blocks in {len(stacks)} stack{plural}; steps are judged at {leaders}"
        streamed, whole = sum(stack.num_bytes for stack in stacks), sum(c.num_bytes or 0 for c in denoisers)
        yield FeatureReport("step cache", True, found)
        yield FeatureReport(
            "layerwise offload", True, f"{blocks} blocks hold {streamed / max(whole, 1):.0%} of the denoiser"
        )
    else:
        nothing = "no stack of blocks was found; declare one with register_declaration"
        yield without_stacks("step cache", nothing)
        yield without_stacks("layerwise offload", nothing)
    if denoisers and encoders:
        yield FeatureReport("model offload", True, f"the denoiser takes turns with {encoders}")
    else:
        yield FeatureReport("model offload", False, "a denoiser and an encoder that can take turns are needed")
    if planned:
        yield FeatureReport("sequence parallel", True, f"the plan comes with {', '.join(planned)}")
    elif stacks:
        yield FeatureReport("sequence parallel", True, "a plan is derived from the stacks and checked before use")
    else:
        yield without_stacks("sequence parallel", "there is no plan, and no stack to derive one from")
