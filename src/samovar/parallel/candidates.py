"""Which plans may fit a model of which nothing is known? The one that shares most first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..arch import Anatomy, BlockStack
from ..errors import SamovarError
from ..trace.watch import Watcher
from .derive import StackSplit, split_stack
from .inside import plan_inside
from .plan import SequenceParallelModelPlan

MISFIT = (SamovarError, RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
"""What a model raises that is given tensors of other shapes than it can take."""


@dataclass
class Candidate:
    """A plan that may fit."""

    source: str
    plan: SequenceParallelModelPlan
    shares_attention: bool = False
    """Whether attentions of which every rank has all are computed in parts."""


def candidates(
    model: torch.nn.Module, anatomy: Anatomy, watched: Watcher, size: int, rejected: dict[str, str]
) -> Iterator[Candidate]:
    """Plans that are derived from what a forward did with the blocks. Why there is none for a stack goes to
    `rejected`. All ranks get the same, in the same order."""
    yield from _of_blocks(_stack_splits(model, anatomy, watched, size, rejected))
    ran = [stack for stack in anatomy.stacks if any(path in watched.calls for path in stack.block_paths)]
    alone = [stack for stack in ran if not _runs_between_others(stack, ran, watched)]
    for attends in (True, False):
        source = "derived inside blocks" if attends else "derived inside blocks (attention shared)"
        for stacks in (ran, *([alone] if 0 < len(alone) < len(ran) else [])):
            of = "" if stacks is ran else f" of {', '.join(stack.path for stack in stacks)}"
            plan: SequenceParallelModelPlan = {}
            for stack in stacks:
                try:
                    plan |= plan_inside(model, stack, watched, size, attends=attends)
                except MISFIT as error:
                    rejected[f"{source}: {stack.path}"] = f"{type(error).__name__}: {error}"
            if plan:
                yield Candidate(f"{source}{of}", plan, shares_attention=True)
    # What cannot be split anywhere can still share the work of its attentions.
    yield Candidate("attention only", {}, shares_attention=True)


def _runs_between_others(stack: BlockStack, stacks: Sequence[BlockStack], watched: Watcher) -> bool:
    """Whether a stack first runs when another has begun and not ended: it changes what stands beside the tokens."""
    moments = [[i for i, path in enumerate(watched.blocks) if path in other.block_paths] for other in (stack, *stacks)]
    own, *others = moments
    return any(other[0] < own[0] < other[-1] for other in others if other)


def _stack_splits(
    model: torch.nn.Module, anatomy: Anatomy, watched: Watcher, size: int, rejected: dict[str, str]
) -> list[StackSplit]:
    """How the stacks with the longest sequences can be split."""
    splits = []
    for stack in anatomy.stacks:
        if any(path in watched.calls for path in stack.block_paths):
            try:
                splits.append(split_stack(model, stack, watched, size))
            except MISFIT as error:
                rejected[stack.path] = f"{type(error).__name__}: {error}"
    longest = max((split.length for split in splits), default=0)
    return [split for split in splits if 2 * split.length >= longest]


def _of_blocks(splits: list[StackSplit]) -> Iterator[Candidate]:
    """Whole blocks: of all stacks, or of one; at the first and the last one, or at each."""
    scopes = {"split once": False, "split at each block": True}
    for chosen in [splits, *([split] for split in reversed(splits) if len(splits) > 1)]:
        for how, each_block in scopes.items():
            plan: SequenceParallelModelPlan = {}
            for split in chosen:
                plan |= split.plan(each_block=each_block)
            if plan:
                yield Candidate(f"derived for {', '.join(split.stack.path for split in chosen)} ({how})", plan)
