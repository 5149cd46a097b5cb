"""Where can a block be split that cannot be split as a whole?

Around the modules in it, one by one: an attention whose tokens meet there only, and a feed-forward network, in which
they do not meet at all. Whatever the block does between them, it does with all tokens on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..arch import BlockStack
from ..arch.blocks import output_values
from ..arch.modules import parameters_of, unwrapped
from ..errors import ModelError
from ..trace.watch import BlockCall, Watcher
from .derive import Trial
from .plan import InputTree, SequenceParallelInput, SequenceParallelModelPlan, SequenceParallelOutput

_MISFIT = (ModelError, RuntimeError, ValueError, TypeError, IndexError, KeyError)


@dataclass
class PartSplit:
    """How one module of a block can be split."""

    inputs: dict[str, InputTree]
    outputs: Any
    sequence: tuple[int, int]
    """The dimension of its tokens, and how many there are."""
    attends: bool


@dataclass
class _Parts:
    """The modules of one block, as they were found."""

    found: dict[str, list[PartSplit]] = field(default_factory=dict)
    """By name: in which ways each can be split."""
    is_busy: bool = False


def plan_inside(
    model: torch.nn.Module, stack: BlockStack, watched: Watcher, size: int, *, attends: bool
) -> SequenceParallelModelPlan:
    """A plan that splits around the modules of each block, found by trying those of the first block of each kind. With
    `attends`, along the sequences of the longest attentions; else attention stays whole."""
    kinds: dict[Any, list[str]] = {}
    for path in dict.fromkeys(path for path in watched.blocks if path in stack.block_paths):
        kinds.setdefault(_kind(unwrapped(model.get_submodule(path))), []).append(path)
    chosen: dict[str, dict[str, PartSplit | None]] = {}
    for paths in kinds.values():
        block = unwrapped(model.get_submodule(paths[0]))
        splits = _chosen(_parts_of(block, watched.calls[paths[0]], size), attends=attends)
        for name, _ in block.named_children():
            chosen.setdefault(name, {}).update(dict.fromkeys(paths, splits.get(name)))
    plan: SequenceParallelModelPlan = {}
    for name, by_path in chosen.items():
        split = next(iter(by_path.values()))
        # Inputs are split by one key for all blocks: of one module, a plan gathers the outputs by another.
        if split is not None and all(other == split for other in by_path.values()):
            plan[f"{stack.pattern}.{name}"] = split.inputs
            plan |= {f"{path}.{name}": split.outputs for path in by_path}
    if not plan:
        where = "meet in attention only" if attends else "do not meet"
        raise ModelError(f"No module in the blocks of {stack.path!r} has tokens that {where}.")
    return plan


def _kind(block: torch.nn.Module) -> Any:
    return type(block), tuple((name, type(part)) for name, part in block.named_children())


def _parts_of(block: torch.nn.Module, call: BlockCall, size: int) -> dict[str, list[PartSplit]]:
    """The modules of a block, each with the ways in which it can be split."""
    parts = _Parts()
    with _trying_parts(block, parts, size), torch.no_grad():
        values = list(call.arguments.values())
        block(*values[: call.num_positional], **dict(list(call.arguments.items())[call.num_positional :]))
    return parts.found


def _chosen(parts: dict[str, list[PartSplit]], *, attends: bool) -> dict[str, PartSplit]:
    """Those that can be split along a long sequence: that of an attention, with `attends`."""
    sequences = {split.sequence for splits in parts.values() for split in splits if split.attends == attends}
    longest = max((length for _, length in sequences), default=0)
    long = {sequence for sequence in sequences if 2 * sequence[1] >= longest}
    chosen = {}
    for name, splits in parts.items():
        fitting = [split for split in splits if split.sequence in long and (attends or not split.attends)]
        if fitting:
            chosen[name] = max(fitting, key=lambda split: split.sequence[1])
    return chosen


@contextlib.contextmanager
def _trying_parts(block: torch.nn.Module, parts: _Parts, size: int) -> Iterator[None]:
    """Try each module of a block when it has been called: then whatever it needs is where it must be."""

    def after(name: str) -> Callable[..., None]:
        def attempt(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if parts.is_busy:
                return
            arguments = dict(zip(parameters_of(module), args, strict=False)) | kwargs
            parts.is_busy = True
            try:
                parts.found[name] = _ways(module, name, BlockCall(arguments, len(args), output), size)
            finally:
                parts.is_busy = False

        return attempt

    with contextlib.ExitStack() as removals:
        for name, module in block.named_children():
            if any(parameter.ndim > 1 for parameter in module.parameters()):
                bare = unwrapped(module)
                removals.callback(bare.register_forward_hook(after(name), with_kwargs=True).remove)
        yield


def _ways(module: torch.nn.Module, name: str, call: BlockCall, size: int) -> list[PartSplit]:
    """In which ways a module can be split: an attention in one, another along each sequence that it may have."""
    try:
        trial = Trial(module, call, name, parameters_of(module))
        if trial.attends:
            stream, dim = trial.token_dim(size)
            places, count = trial.outputs_with_tokens(), len(output_values(call.output))
            outputs: Any = [SequenceParallelOutput(dim) if place in places else None for place in range(count)]
            sequence = dim, call.arguments[stream].shape[dim]
            inputs = {stream: SequenceParallelInput(dim), **trial.tables()}
            return [PartSplit(inputs, outputs[0] if count == 1 else outputs, sequence, True)]
        return list(_without_attention(trial, call, size))
    except _MISFIT:
        return []


def _without_attention(trial: Trial, call: BlockCall, size: int) -> Iterator[PartSplit]:
    for name, tensor in call.arguments.items():
        is_stream = isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.ndim > 1
        if not is_stream or not isinstance(call.output, torch.Tensor) or call.output.shape != tensor.shape:
            continue
        for dim in range(tensor.ndim - 1):
            if tensor.shape[dim] >= 2 * size and trial.is_token_dim(name, tensor, dim, attends=False):
                trial.follow(name, dim)
                if not trial.mixes_by_others():
                    inputs = {name: SequenceParallelInput(dim), **trial.tables()}
                    yield PartSplit(inputs, SequenceParallelOutput(dim), (dim, tensor.shape[dim]), False)
