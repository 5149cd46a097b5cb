"""What are a stack's tokens made of: what is denoised, the conditioning, or both?

The model runs with its blocks passing their input on unchanged, once as it is, once with another sample
and once with other conditioning. A token that moves with the sample belongs to it; one that moves with
the conditioning alone is text. Attention, which mixes everything, does not take part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..arch.blocks import Anatomy, BlockStack, Kind, in_form_of, output_values
from ..arch.modules import unwrapped
from ..errors import ModelError

Inputs = Mapping[str, Any]
"""The keyword arguments of one forward of the model."""
Returned = Mapping[torch.nn.Module, Any]
"""What each block returns, as tensors without data."""
Entries = dict[tuple[str, str | None], torch.Tensor]
"""What reaches the first block of a stack, by the stack's path and the block's parameter."""

_TIME = ("timestep", "timesteps", "t", "sigma", "sigmas", "r_timestep")
_GEOMETRY = ("mask", "_ids", "rope", "rotary", "pos", "guidance", "scale", "freqs", "ind", "shape", "len")


def with_kinds(
    model: torch.nn.Module, anatomy: Anatomy, returned: Returned, inputs: Inputs, later_inputs: Inputs
) -> Anatomy:
    """The anatomy with the kind of every stream."""
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
    if not sample:
        raise ModelError(
            f"inputs and later_inputs hold the same values in {', '.join(map(repr, sorted(names)))}. The arguments of "
            "two different denoising steps were expected: what differs between them is the sample. Change it in "
            "later_inputs, or leave later_inputs out."
        )
    geometry = {name for name in names if any(word in name for word in _GEOMETRY)} - {"input_ids"}
    return sample, names - sample - geometry


def _entries(
    model: torch.nn.Module,
    stacks: tuple[BlockStack, ...],
    passing: Collection[BlockStack],
    returned: Returned,
    inputs: Inputs,
) -> Entries:
    """Run the model with the blocks of some stacks passing their input on."""
    entries: Entries = {}
    passing_paths = {stack.path for stack in passing}

    def note(stack: BlockStack, arguments: Mapping[str, Any]) -> None:
        for name in stack.carried:
            if isinstance(arguments.get(name), torch.Tensor):
                entries.setdefault((stack.path, name), arguments[name].detach().clone())

    def replacement(stack: BlockStack, block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)  # The signature by which the arguments are read.
        def replaced(*args: Any, **kwargs: Any) -> Any:
            arguments = stack.arguments(block, args, kwargs)
            note(stack, arguments)
            if stack.path in passing_paths:
                return _passed_on(stack, returned[unwrapped(block)], arguments)
            return forward(*args, **kwargs)

        return replaced

    with contextlib.ExitStack() as restorations:
        for stack in stacks:
            for block in dict.fromkeys(stack.modules(model)):
                restorations.callback(_set_forward, block, vars(block).get("forward"))
                _set_forward(block, replacement(stack, block, block.forward))
        run_model(model, inputs)
    return entries


def _set_forward(block: torch.nn.Module, forward: Any) -> None:
    if forward is None:
        del vars(block)["forward"]
    else:
        vars(block)["forward"] = forward


def _passed_on(stack: BlockStack, returned: Any, arguments: Mapping[str, Any]) -> Any:
    """What a block would return if it did nothing: its carried inputs, and zeros for the rest."""
    devices = [value.device for value in arguments.values() if isinstance(value, torch.Tensor)]
    values: list[Any] = []
    for stream, form in zip(stack.streams, output_values(returned), strict=True):
        passed = arguments.get(stream.parameter or "")
        fits = isinstance(passed, torch.Tensor) and isinstance(form, torch.Tensor) and passed.shape == form.shape
        values.append(passed if fits else _zeros(form, devices[0] if devices else None))
    return in_form_of(returned, values)


def _zeros(form: Any, device: torch.device | None) -> Any:
    if isinstance(form, torch.Tensor):
        return torch.zeros_like(form, device=device or "cpu")
    return in_form_of(form, [_zeros(part, device) for part in form]) if isinstance(form, (tuple, list)) else None


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
