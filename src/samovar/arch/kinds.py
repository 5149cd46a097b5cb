"""What are a stack's tokens made of: what is denoised, the conditioning, or both?

The model runs with its blocks passing their input on unchanged, once as it is, once with another sample
and once with other conditioning. A token that moves with the sample belongs to it; one that moves with
the conditioning alone is text. Attention, which mixes everything, does not take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from .blocks import Anatomy, BlockStack, Kind, output_values

Inputs = Mapping[str, Any]
Entries = dict[tuple[str, str | None], torch.Tensor]
"""What reaches the first block of a stack, by the stack's path and the block's parameter."""

_TIME = ("timestep", "timesteps", "t", "sigma", "sigmas", "r_timestep")
_GEOMETRY = ("mask", "_ids", "rope", "rotary", "pos", "guidance", "scale", "freqs", "ind", "shape", "len")


def with_kinds(
    model: torch.nn.Module, anatomy: Anatomy, returned: Mapping[str, Any], inputs: Inputs, later_inputs: Inputs
) -> Anatomy:
    """The anatomy with the kind of every stream. `returned` is what each block returns, without data."""
    changes = ((), *_sample_and_conditioning(inputs, later_inputs))
    versions = [{name: _other(v) if name in change else v for name, v in inputs.items()} for change in changes]
    stacks = passing = anatomy.stacks
    while passing:
        entries = [_entries(model, stacks, passing, returned, version) for version in versions]
        stacks = tuple(_with_kinds_of(stack, *entries) for stack in stacks)
        # Stacks that see nothing of the sample run after all: learned queries turn into text in them.
        sampled = tuple(s for s in stacks if any(stream.kind in ("image", "joint") for stream in s.streams))
        if len(sampled) == len(passing):
            break
        passing = sampled
    return replace(anatomy, stacks=stacks)


def run_model(model: torch.nn.Module, inputs: Inputs) -> Any:
    """Call a model in such a way that it can be called again: some empty the lists they are given."""
    return model(**{name: list(value) if type(value) is list else value for name, value in inputs.items()})


def _sample_and_conditioning(inputs: Inputs, later_inputs: Inputs) -> tuple[set[str], set[str]]:
    """The inputs that hold what is denoised, and those that hold conditioning."""
    names = set(inputs).difference(_TIME)
    sample = {name for name in names if not _same(inputs[name], later_inputs.get(name))}
    geometry = {name for name in names if any(word in name for word in _GEOMETRY)} - {"input_ids"}
    return sample, names - sample - geometry


def _entries(
    model: torch.nn.Module,
    stacks: tuple[BlockStack, ...],
    passing: Collection[BlockStack],
    returned: Mapping[str, Any],
    inputs: Inputs,
) -> Entries:
    """Run the model with the blocks of some stacks passing their input on."""
    entries: Entries = {}
    passing_paths = {stack.path for stack in passing}

    def note(stack: BlockStack, arguments: Mapping[str, Any]) -> None:
        for name in stack.carried:
            if isinstance(arguments.get(name), torch.Tensor):
                entries.setdefault((stack.path, name), arguments[name].detach().clone())

    def replacement(stack: BlockStack, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            arguments = dict(zip(stack.parameters, args, strict=False)) | kwargs
            note(stack, arguments)
            if stack.path in passing_paths:
                return _passed_on(stack, returned[path], arguments)
            return forward(*args, **kwargs)

        return replaced

    with contextlib.ExitStack() as restorations:
        for stack in stacks:
            for path, block in zip(stack.block_paths, stack.modules(model), strict=True):
                restorations.callback(_set_forward, block, vars(block).get("forward"))
                _set_forward(block, replacement(stack, path, block.forward))
        run_model(model, inputs)
    return entries


def _set_forward(block: torch.nn.Module, forward: Any) -> None:
    if forward is None:
        del vars(block)["forward"]
    else:
        vars(block)["forward"] = forward


def _passed_on(stack: BlockStack, returned: Any, arguments: Mapping[str, Any]) -> Any:
    """What a block would return if it did nothing: its carried inputs, and zeros for the rest."""
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    values: list[Any] = []
    for stream, form in zip(stack.streams, output_values(returned), strict=True):
        passed = arguments.get(stream.parameter or "")
        if form is None or (isinstance(passed, torch.Tensor) and passed.shape == form.shape):
            values.append(None if form is None else passed)
        else:
            values.append(torch.zeros_like(form, device=device))
    return values[0] if isinstance(returned, torch.Tensor) else type(returned)(values)


def _with_kinds_of(stack: BlockStack, plain: Entries, other_sample: Entries, other_conditioning: Entries) -> BlockStack:
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
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return isinstance(other, type(one)) and len(one) == len(other) and all(map(_same, one, other))
    return True


def _other(value: Any) -> Any:
    """Another value of the same form: other numbers, or the same token ids in another order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            return value + torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        return value if value.dtype == torch.bool or value.ndim == 0 else value.roll(1, -1)
    return type(value)(map(_other, value)) if type(value) in (list, tuple) else value
