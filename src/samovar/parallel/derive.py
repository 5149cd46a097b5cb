"""Which plans may fit a model without one? The plan that shares most comes first.

Whole blocks are tried first. A block that cannot be split as a whole may be split around the modules in it: an
attention whose tokens meet only there, and a feed-forward network, in which they do not meet at all. Whatever the block
does between them, it does with all tokens on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..arch import Anatomy, BlockStack
from ..arch.modules import parameters_of, unwrapped
from ..core.errors import ModelError
from ..trace.shadow import TrialFailed, trial
from ..trace.watch import BlockCall, Watcher
from .plan import SequenceParallelModelPlan
from .trial import Split, Trial, call_again


class Candidate(NamedTuple):
    """A plan that may fit."""

    source: str
    plan: SequenceParallelModelPlan
    shares_attention: bool = False
    """Whether ranks share the work of attentions whose tokens are not split."""


def candidates(
    model: torch.nn.Module, anatomy: Anatomy, watched: Watcher, size: int, rejected: dict[str, str]
) -> Iterator[Candidate]:
    """Plans derived from what a forward did with the blocks. `rejected` gets the reason for each stack that has none.
    All ranks get the same, in the same order."""
    ran = [stack for stack in anatomy.stacks if any(path in watched.calls for path in stack.block_paths)]
    yield from _of_blocks(model, ran, watched, size, rejected)
    alone = [stack for stack in ran if not _runs_between_others(stack, ran, watched)]
    for attends in (True, False):
        source = "derived inside blocks" if attends else "derived inside blocks (attention shared)"
        for stacks in (ran, *([alone] if 0 < len(alone) < len(ran) else [])):
            of = "" if stacks is ran else f" of {', '.join(stack.path for stack in stacks)}"
            plan: SequenceParallelModelPlan = {}
            for stack in stacks:
                with _noting_failure(rejected, f"{source}: {stack.path}"):
                    plan |= in_block_plan(model, stack, watched, size, attends=attends)
            if plan:
                yield Candidate(f"{source}{of}", plan, shares_attention=True)
    # A model that cannot be split anywhere can still share the work of its attentions.
    yield Candidate("attention only", {}, shares_attention=True)


@contextlib.contextmanager
def _noting_failure(rejected: dict[str, str], source: str) -> Iterator[None]:
    """Inside, an error is noted and otherwise ignored."""
    try:
        with trial(()):
            yield
    except TrialFailed as error:
        rejected[source] = str(error)


def _runs_between_others(stack: BlockStack, stacks: Sequence[BlockStack], watched: Watcher) -> bool:
    """Whether a stack first runs after another has begun and before it has ended: it changes other values than the
    tokens."""
    moments = [[i for i, path in enumerate(watched.blocks) if path in other.block_paths] for other in (stack, *stacks)]
    own, *others = moments
    return any(other[0] < own[0] < other[-1] for other in others)


# ------------------------------------------------------------------------------------------------ whole blocks


def _of_blocks(
    model: torch.nn.Module, stacks: Sequence[BlockStack], watched: Watcher, size: int, rejected: dict[str, str]
) -> Iterator[Candidate]:
    """Plans for the stacks with the longest sequences: all of them or one; split once, or at each block."""
    splits: list[tuple[BlockStack, Split]] = []
    for stack in stacks:
        with _noting_failure(rejected, stack.path):
            splits.append((stack, split_stack(model, stack, watched, size)))
    longest = max((split.length for _, split in splits), default=0)
    splits = [(stack, split) for stack, split in splits if 2 * split.length >= longest]
    for chosen in [splits, *([one] for one in reversed(splits) if len(splits) > 1)]:
        for how, each_block in {"split once": False, "split at each block": True}.items():
            plan: SequenceParallelModelPlan = {}
            for stack, split in chosen:
                plan |= stack_plan(stack, split, watched, each_block=each_block)
            if plan:
                yield Candidate(f"derived for {', '.join(stack.path for stack, _ in chosen)} ({how})", plan)


def split_stack(model: torch.nn.Module, stack: BlockStack, watched: Watcher, size: int) -> Split:
    """How to split the blocks of a stack, found by trying the first one."""
    first = _paths(stack, watched)[0]
    block = unwrapped(model.get_submodule(first))
    tried = Trial(block, watched.calls[first], stack.carried)
    splits = tried.splits(size) if tried.attends else []
    if not splits:
        raise ModelError(
            f"The blocks of {stack.path!r} cannot be split: no argument of {type(block).__name__} has a dimension of "
            f"at least {size} along which tokens interact through attention only."
        )
    return splits[0]


def stack_plan(stack: BlockStack, split: Split, watched: Watcher, *, each_block: bool) -> SequenceParallelModelPlan:
    """Split at the first block and gather after the last, or around each block."""
    paths = _paths(stack, watched)
    if each_block or paths[0] == paths[-1]:
        return {stack.pattern: split.inputs, **dict.fromkeys(stack.block_paths, split.outputs)}
    tables = {stack.pattern: dict(split.tables)} if split.tables else {}
    return {paths[0]: {split.stream: split.inputs[split.stream]}, **tables, paths[-1]: split.outputs}


def _paths(stack: BlockStack, watched: Watcher) -> list[str]:
    return [path for path in watched.blocks if path in stack.block_paths]


# ------------------------------------------------------------------------------------------------ inside of blocks


def in_block_plan(
    model: torch.nn.Module, stack: BlockStack, watched: Watcher, size: int, *, attends: bool
) -> SequenceParallelModelPlan:
    """A plan that splits around the modules of each block, found by trying those of the first block of each kind. With
    `attends`, along the sequences of the longest attentions; else attention stays whole."""
    kinds: dict[Any, list[str]] = {}
    for path in dict.fromkeys(_paths(stack, watched)):
        block = unwrapped(model.get_submodule(path))
        kind = type(block), tuple((name, type(part)) for name, part in block.named_children())
        kinds.setdefault(kind, []).append(path)
    chosen: dict[str, dict[str, Split | None]] = {}
    for paths in kinds.values():
        block = unwrapped(model.get_submodule(paths[0]))
        splits = _longest(_splits_of_children(block, watched.calls[paths[0]], size), attends=attends)
        for name, _ in block.named_children():
            chosen.setdefault(name, {}).update(dict.fromkeys(paths, splits.get(name)))
    plan: SequenceParallelModelPlan = {}
    for name, by_path in chosen.items():
        split = next(iter(by_path.values()))
        # One key splits the inputs of all blocks, as the outputs of each are gathered by the key of its own path.
        if split is not None and all(other == split for other in by_path.values()):
            plan[f"{stack.pattern}.{name}"] = split.inputs
            plan |= {f"{path}.{name}": split.outputs for path in by_path}
    if not plan:
        where = "meet only in attention" if attends else "do not meet"
        raise ModelError(f"No module in the blocks of {stack.path!r} has tokens that {where}.")
    return plan


def _longest(by_name: dict[str, list[Split]], *, attends: bool) -> dict[str, Split]:
    """The splits along a long sequence: that of an attention, with `attends`."""
    sequences = {(s.dim, s.length) for splits in by_name.values() for s in splits if s.attends == attends}
    longest = max((length for _, length in sequences), default=0)
    chosen = {}
    for name, splits in by_name.items():
        fitting = [
            split
            for split in splits
            if (split.dim, split.length) in sequences and 2 * split.length >= longest and (attends or not split.attends)
        ]
        if fitting:
            chosen[name] = max(fitting, key=lambda split: split.length)
    return chosen


def _splits_of_children(block: torch.nn.Module, call: BlockCall, size: int) -> dict[str, list[Split]]:
    """For each module of a block, the ways to split it. Each is tried right after it was called in a run of the block:
    then its weights are where they must be."""
    found: dict[str, list[Split]] = {}
    is_trying = False

    def after(name: str) -> Callable[..., None]:
        def attempt(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal is_trying
            if not is_trying:
                arguments = dict(zip(parameters_of(module), args, strict=False)) | kwargs
                call = BlockCall(arguments, len(args), output)
                is_trying = True
                with _noting_failure({}, name):
                    found[name] = Trial(module, call, parameters_of(module)).splits(size)
                is_trying = False

        return attempt

    with contextlib.ExitStack() as removals, torch.no_grad():
        for name, module in block.named_children():
            if any(parameter.ndim > 1 for parameter in module.parameters()):
                removals.enter_context(unwrapped(module).register_forward_hook(after(name), with_kwargs=True))
        call_again(block, call, call.arguments)
    return found
