"""What is a model built of, as its own forward shows it?

One forward shows which stacks run and what their blocks carry. To see what the tokens are, the model runs with its
blocks handing their input on unchanged: once as it is, once with another sample and once with other conditioning. A
token that moves with the sample belongs to it; one that moves only with the conditioning is text. Attention, which
mixes everything, takes no part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..arch.blocks import Anatomy, BlockStack, Kind, find_anatomy
from ..arch.declarations import declaration_for
from ..arch.modules import parameters_of, unwrapped
from ..core import nested
from ..core.errors import ModelError
from ..hooks import NOT_BYPASSED
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

    try:  # Two steps are not worth a compilation.
        with denoiser.register_forward_pre_hook(note, with_kwargs=True), torch.compiler.set_stance("force_eager"):
            pipeline(**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{type(pipeline).__name__} could not be run with the settings {settings}: {error} Give the settings that "
            f"it needs, or probe its {type(denoiser).__name__} with your own inputs: probe_anatomy."
        ) from error
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
        {name: nested.map_tensors(_other, v) if name in change else v for name, v in inputs.items()}
        for change in changes
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
    ones, others = list(nested.tensors(one)), list(nested.tensors(other))
    return len(ones) == len(others) and all(map(torch.equal, ones, others))


def _other(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same form: other numbers, or the same token ids in another order."""
    if tensor.is_floating_point():
        return tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    return tensor if tensor.dtype == torch.bool or tensor.ndim == 0 else tensor.roll(1, -1)
