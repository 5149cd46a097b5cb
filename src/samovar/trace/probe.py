"""What is a model built of, as its own forward shows it, and which features can be used with it?

One forward shows which stacks run and what their blocks carry. To see what the tokens are, the model runs with its
blocks handing their input on unchanged: once as it is, once with another sample and once with other conditioning. A
token that moves with the sample belongs to it; one that moves only with the conditioning is text. Attention, which
mixes everything, takes no part.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from .. import tree
from ..arch.blocks import Anatomy, BlockStack, Coverage, Kind, coverage, find_anatomy
from ..arch.components import Role
from ..arch.declarations import declaration_for
from ..arch.folder import check_loaded, pipeline_class, read_index
from ..arch.gguf_file import read_gguf
from ..arch.modules import parameters_of, tensor_bytes, unwrapped
from ..arch.quantised import as_stored
from ..arch.skeleton import Part, Parts, loaded_parts, read_skeleton
from ..errors import ModelError
from ..files import index_file, reading
from ..hooks import NOT_BYPASSED
from ..other_libraries import declared_plans, quantised_as
from ..tensors import problem_of
from .forward import filled
from .watch import Gate, Gates, Watcher

Inputs = Mapping[str, Any]
"""The keyword arguments of one forward of the model."""
_Entries = dict[tuple[str, str | None], torch.Tensor]
"""What reaches the first block of a stack, by the stack's path and the block's parameter."""

_TIME = ("timestep", "timesteps", "t", "sigma", "sigmas", "r_timestep")
_GEOMETRY = ("mask", "_ids", "rope", "rotary", "pos", "guidance", "scale", "freqs", "ind", "shape", "len")


def probe_anatomy(model: torch.nn.Module, inputs: Inputs, later_inputs: Inputs | None = None) -> Anatomy:
    """A transformer's anatomy, confirmed by running it.

    `inputs` are the keyword arguments of one denoising step, `later_inputs` those of a later one: what differs between
    them is the sample. Without them, streams get no kind.
    """
    model = unwrapped(model)
    anatomy = find_anatomy(model)
    if not anatomy.stacks:
        raise ModelError(
            f"No stack of blocks was found in {anatomy.model_class}: no list of modules that are built alike and add "
            "to their input. Declare it: register_declaration(class_name, BlockDeclaration(stacks=(path, ...)))."
        )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        watcher = Watcher(model, anatomy)
        with watcher.watching():
            _run(model, inputs)
        anatomy = watcher.anatomy()
        if later_inputs is not None:
            anatomy = _with_kinds(model, anatomy, watcher.returned, inputs, later_inputs)
    paths, sampled = [stack.path for stack in anatomy.stacks], [s.path for s in anatomy.stacks if _sees_sample(s)]
    declared = declaration_for(model).leader
    return replace(anatomy, leader=declared if declared in paths else [*sampled, *paths][0])


def probe_pipeline(pipeline: Any, denoiser: torch.nn.Module, **settings: Any) -> Anatomy:
    """The anatomy of a pipeline's denoiser, from two steps of the pipeline, called with `settings`."""
    calls: list[dict[str, Any]] = []
    denoiser = unwrapped(denoiser)
    parameters = parameters_of(denoiser)
    settings = {"prompt": "a samovar", "num_inference_steps": 2, "output_type": "latent"} | settings

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(dict(zip(parameters, args, strict=False)) | kwargs)

    handle = denoiser.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # Two steps are not worth a compilation.
            pipeline(**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{type(pipeline).__name__} could not be run with the settings {settings}: {error} Give the settings that "
            f"it needs, or probe its {type(denoiser).__name__} with your own inputs: probe_anatomy."
        ) from error
    finally:
        handle.remove()
    if len(calls) < 2:
        raise ModelError(
            f"{type(pipeline).__name__} called its {type(denoiser).__name__} {len(calls)} times in two steps; at least "
            "two calls are needed to see what a step changes. Probe it with your own inputs: probe_anatomy."
        )
    # However many branches there are, the call half-way is the first branch of the second step.
    return probe_anatomy(denoiser, calls[0], calls[len(calls) // 2])


def _run(model: torch.nn.Module, inputs: Inputs) -> Any:
    """Call a model so that it can be called again: some models empty the lists they are given."""
    return model(**{name: list(value) if type(value) is list else value for name, value in inputs.items()})


def _with_kinds(
    model: torch.nn.Module, anatomy: Anatomy, returned: Mapping[Any, Any], inputs: Inputs, later_inputs: Inputs
) -> Anatomy:
    """The anatomy with the kind of every stream. `returned`: the form of each block's output."""
    changes = ((), *_sample_and_conditioning(inputs, later_inputs))
    versions = [
        {name: tree.map_tensors(_other, v) if name in change else v for name, v in inputs.items()} for change in changes
    ]
    stacks = passing = anatomy.stacks
    while passing:
        passes = [_PassingOn({stack.path for stack in passing}, returned) for _ in versions]
        with Gates(model, anatomy, "kinds") as gates:
            for running, version in zip(passes, versions, strict=True):
                with gates.asking(running):
                    _run(model, version)
        stacks = tuple(_with_kinds_of(stack, *(running.entries for running in passes)) for stack in stacks)
        # Stacks that see nothing of the sample run after all: learned queries turn into text in them.
        sampled = tuple(filter(_sees_sample, stacks))
        if len(sampled) == len(passing):
            break
        passing = sampled
    return replace(anatomy, stacks=stacks)


def _sees_sample(stack: BlockStack) -> bool:
    return any(stream.kind in ("image", "joint") for stream in stack.streams)


class _PassingOn:
    """A pass in which the blocks of some stacks hand their input on."""

    def __init__(self, paths: Collection[str], returned: Mapping[Any, Any]) -> None:
        self._paths, self._returned = paths, returned
        self.entries: _Entries = {}

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        stack = gate.stack
        if stack is None:
            return NOT_BYPASSED
        arguments = stack.arguments(module, args, kwargs)
        for name in stack.carried:
            if isinstance(arguments.get(name), torch.Tensor):
                self.entries.setdefault((stack.path, name), arguments[name].detach().clone())
        if stack.path not in self._paths:
            return NOT_BYPASSED
        values = [arguments.get(stream.parameter or "") for stream in stack.streams]
        return filled(self._returned[unwrapped(module)], values, arguments.values())

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        pass


def _sample_and_conditioning(inputs: Inputs, later_inputs: Inputs) -> tuple[set[str], set[str]]:
    """The names of the inputs that hold the sample, and of those that hold conditioning."""
    names = set(inputs).difference(_TIME)
    sample = {name for name in names if not _same(inputs[name], later_inputs.get(name))}
    if not sample:
        raise ModelError(
            f"inputs and later_inputs hold the same values in {', '.join(map(repr, sorted(names)))}; expected the "
            "arguments of two different denoising steps: what differs between them is the sample. Change it in "
            "later_inputs, or leave later_inputs out."
        )
    geometry = {name for name in names if any(word in name for word in _GEOMETRY)} - {"input_ids"}
    return sample, names - sample - geometry


def _with_kinds_of(
    stack: BlockStack, plain: _Entries, other_sample: _Entries, other_conditioning: _Entries
) -> BlockStack:
    def kind(parameter: str | None) -> Kind | None:
        key = (stack.path, parameter)
        if key not in plain:
            return None
        is_sample = _moved(plain[key], other_sample[key])
        is_text = _moved(plain[key], other_conditioning[key]) & ~is_sample
        if not is_sample.any():
            return "text"
        return "joint" if is_text.any() else "image"

    return replace(stack, streams=tuple(replace(stream, kind=kind(stream.parameter)) for stream in stack.streams))


def _moved(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which tokens differ."""
    return (one != other).reshape(-1, one.shape[-1] if one.ndim else 1).any(-1)


def _same(one: Any, other: Any) -> bool:
    ones, others = list(tree.tensors(one)), list(tree.tensors(other))
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same form: other numbers, or the same token ids in another order."""
    if tensor.is_floating_point():
        return tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    return tensor if tensor.dtype == torch.bool or tensor.ndim == 0 else tensor.roll(1, -1)


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
    """Read a model folder, a GGUF file, or a diffusers class by its name."""
    if source.endswith(".gguf") and Path(source).expanduser().is_file():
        return _report_file(source)
    return _report(source, *read_skeleton(source))


def _report_file(source: str) -> ModelReport:
    """What a GGUF file holds. It has weights and their names, and not what they are the weights of."""
    file = read_gguf(source)
    count, num_bytes = sum(map(math.prod, file.shapes.values())), sum(file.num_bytes.values())
    part = ComponentReport("transformer", "denoiser", file.architecture, count, num_bytes, quantization=file.kind)
    why = "a GGUF file does not say how its model is built: plan or generate with the model's folder and this file as "
    features = [FeatureReport(name, None, f"{why}--quantization") for name in ("step cache", "layerwise offload")]
    return ModelReport(source, f"GGUF file of {file.architecture}", file.types[0], (part,), tuple(features))


def survey_pipeline(pipeline: Any) -> ModelReport:
    """The same for a loaded pipeline or bare transformer."""
    name = type(unwrapped(pipeline) if isinstance(pipeline, torch.nn.Module) else pipeline).__name__
    return _report(name, name, loaded_parts(pipeline))


def survey_by_running(source: str) -> ModelReport:
    """Load a pipeline folder, run two steps, and report what was seen on the way."""
    folder = Path(source).expanduser()
    if not index_file(folder).is_file():
        raise ModelError(
            f"{source!r} cannot be run; expected a local folder that holds a whole pipeline, with a "
            "model_index.json. Give one (hf download NAME --local-dir FOLDER), or inspect it without running it."
        )
    pipeline = _load(folder)
    parts = loaded_parts(pipeline)
    structure = _report(source, type(pipeline).__name__, parts)
    with reading(f"The pipeline in {folder}", "run"):
        return replace(structure, components=_probed(pipeline, parts, structure.components))


def _load(folder: Path) -> Any:
    import diffusers
    import transformers

    cls = pipeline_class(folder, read_index(folder))
    for logging in (transformers.utils.logging, diffusers.utils.logging):
        logging.disable_progress_bar()  # Theirs are for people who load models by hand.
    _, parts = read_skeleton(str(folder))  # Refuses a broken folder with a better message, before weights are read.
    dtypes = _dtypes(sorted(parts.values(), key=_place))
    given = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
    with reading(f"The pipeline in {folder}"), warnings.catch_warnings():
        # diffusers 0.38 knows only this name; later versions warn about it.
        warnings.filterwarnings("ignore", ".*torch_dtype.* is deprecated", FutureWarning)
        pipeline = cls.from_pretrained(str(folder), torch_dtype=next(dtypes, None), **given)
    check_loaded(pipeline, folder).set_progress_bar_config(disable=True)
    return pipeline


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
    covered = None
    with as_stored({name: part}):
        num_bytes = tensor_bytes([part.module])
        if anatomy and anatomy.stacks:
            stacks = [replace(stack, num_bytes=tensor_bytes(stack.modules(part.module))) for stack in anatomy.stacks]
            anatomy = replace(anatomy, stacks=tuple(stacks))
            covered = coverage(part.module, anatomy)
    kind = part.kind or quantised_as(part.module)
    return ComponentReport(name, part.role, part.cls.__name__, num_parameters, num_bytes, anatomy, covered, kind)


def _features(components: tuple[ComponentReport, ...], parts: Parts) -> Iterator[FeatureReport]:
    denoisers = [c for c in components if c.role == "denoiser"]
    encoders = ", ".join(c.name for c in components if c.role == "encoder")
    stacks = [stack for c in denoisers if c.anatomy for stack in c.anatomy.stacks]
    unbuilt = ", ".join(c.class_name for c in denoisers if c.num_parameters is None)
    planned = [name for name, part in parts.items() if declared_plans(part.cls)]
    unmovable = _unmovable(parts)
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
        held = f"{blocks} blocks hold {100 * streamed / max(whole, 1):.1f} % of the denoiser"
        yield FeatureReport("layerwise offload", not unmovable, unmovable or held)
    else:
        nothing = "no stack of blocks was found; declare one with register_declaration"
        yield without_stacks("step cache", nothing)
        yield without_stacks("layerwise offload", nothing)
    if denoisers and encoders:
        turns = f"the denoiser takes turns with {encoders}"
        yield FeatureReport("model offload", not unmovable, unmovable or turns)
    else:
        yield FeatureReport("model offload", False, "a denoiser and an encoder that can take turns are needed")
    if planned:
        yield FeatureReport("sequence parallel", True, f"the plan comes with {', '.join(planned)}")
    elif stacks:
        yield FeatureReport("sequence parallel", True, "a plan is derived from the stacks and checked before use")
    else:
        yield without_stacks("sequence parallel", "there is no plan, and no stack to derive one from")


def _unmovable(parts: Parts) -> str:
    """Why the components cannot all be offloaded, if weights are loaded that nobody can move."""
    for name, module in [(name, part.module) for name, part in parts.items() if part.module is not None]:
        for path, tensor in (*module.named_parameters(), *module.named_buffers()):
            problem = None if tensor.is_meta else problem_of(tensor)
            if problem:
                return f"{name}.{path} {problem}; leave {name} out: exclude={name!r}"
    return ""
