"""Derives plans for a model without one. The plan that shares most comes first.

Whole blocks are tried first. A block that cannot be split as a whole may be split around the modules in it: an
attention whose tokens meet only there, and a feed-forward network, in which they do not meet at all. Whatever the block
does between them, it does with all tokens on every rank.

Along what a module can be split is found by trying: it runs alone, with one token of an argument changed (to NaN) and
attention that keeps each token to itself. If that one token of the output changes and no other, the module can be split
along it. Every other argument is tried the same way: one that changes a single token is a table with an entry per
token, such as a rotary embedding, and is split with the tokens; the rest stays whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from ..arch import Anatomy, BlockStack
from ..arch.blocks import output_values
from ..arch.modules import parameters_of, unwrapped
from ..core.errors import ModelError
from ..trace.shadow import TrialFailed, trial
from ..trace.watch import BlockCall, Watcher
from .attention import AttentionCall
from .capture import RareCall, attention_through, capturing
from .plan import (
    InputTree,
    SequenceParallelInput,
    SequenceParallelModelPlan,
    SequenceParallelOutput,
    SequenceParallelPartialInput,
)

_TEXT = ("encoder", "text", "context", "txt", "prompt", "und_")
"""Words in the names of arguments that hold conditioning."""


class Candidate(NamedTuple):
    """A plan that may fit."""

    source: str
    plan: SequenceParallelModelPlan
    shares_attention: bool = False
    """Whether ranks share the work of attentions whose tokens are not split."""


def candidates(
    model: Module, anatomy: Anatomy, watched: Watcher, size: int, rejected: dict[str, str]
) -> Iterator[Candidate]:
    """Plans derived from what a forward did with the blocks. `rejected` gets the reason for each stack that has none.
    All ranks get the same, in the same order."""
    ran = [stack for stack in anatomy.stacks if any(path in watched.calls for path in stack.block_paths)]
    yield from _of_blocks(model, ran, watched, size, rejected)
    alone = [stack for stack in ran if not _runs_between_others(stack, ran, watched)]
    for attends in (True, False):
        source = "derived inside blocks" if attends else "derived inside blocks (attention shared)"
        for stacks in (ran, *([alone] if 0 < len(alone) < len(ran) else [])):
            plan: SequenceParallelModelPlan = {}
            for stack in stacks:
                with _noting_failure(rejected, f"{source}: {stack.path}"):
                    plan |= in_block_plan(model, stack, watched, size, attends=attends)
            if plan:
                of = "" if stacks is ran else f" of {', '.join(stack.path for stack in stacks)}"
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
    model: Module, stacks: Sequence[BlockStack], watched: Watcher, size: int, rejected: dict[str, str]
) -> Iterator[Candidate]:
    """Plans for the stacks with the longest sequences: all of them or one; split once, or at each block."""
    splits: list[tuple[BlockStack, Split]] = []
    for stack in stacks:
        with _noting_failure(rejected, stack.path):
            splits.append((stack, split_stack(model, stack, watched, size)))
    longest = max((split.length for _, split in splits), default=0)
    splits = [(stack, split) for stack, split in splits if 2 * split.length >= longest]
    for chosen in [splits, *([one] for one in reversed(splits) if len(splits) > 1)] if splits else []:
        for how, each_block in {"split once": False, "split at each block": True}.items():
            plan: SequenceParallelModelPlan = {}
            for stack, split in chosen:
                plan |= stack_plan(stack, split, watched, each_block=each_block)
            yield Candidate(f"derived for {', '.join(stack.path for stack, _ in chosen)} ({how})", plan)


def split_stack(model: Module, stack: BlockStack, watched: Watcher, size: int) -> Split:
    """How to split the blocks of a stack, found by trying the first one."""
    first = _paths(stack, watched)[0]
    block = unwrapped(model.get_submodule(first))
    tried = Trial(block, watched.calls[first])
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
    model: Module, stack: BlockStack, watched: Watcher, size: int, *, attends: bool
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
    fitting = {
        name: [s for s in splits if (s.dim, s.length) in sequences and 2 * s.length >= longest and attends >= s.attends]
        for name, splits in by_name.items()
    }
    return {name: max(splits, key=lambda split: split.length) for name, splits in fitting.items() if splits}


def _splits_of_children(block: Module, call: BlockCall, size: int) -> dict[str, list[Split]]:
    """For each module of a block, the ways to split it. Each is tried right after it was called in a run of the block:
    then its weights are where they must be."""
    found: dict[str, list[Split]] = {}
    is_trying = False

    def attempt(name: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal is_trying
        if is_trying:
            return
        is_trying = True
        names = parameters_of(module)
        with _noting_failure({}, name):
            own = BlockCall(dict(zip(names, args, strict=False)) | kwargs, len(args), output)
            found[name] = Trial(module, own).splits(size)
        is_trying = False

    with contextlib.ExitStack() as removals, torch.no_grad():
        for name, module in block.named_children():
            if any(parameter.ndim > 1 for parameter in module.parameters()):
                hook = partial(attempt, name)
                removals.enter_context(unwrapped(module).register_forward_hook(hook, with_kwargs=True))
        _call_again(block, call, call.arguments)
    return found


# ------------------------------------------------------------------------------------------------ one module


@dataclass(frozen=True)
class Split:
    """One way to split a module."""

    stream: str
    """The parameter that carries the tokens."""
    dim: int
    length: int
    """Number of tokens."""
    tables: Mapping[str, InputTree]
    """Other parameters that have an entry per token."""
    outputs: Any
    """What to gather, in the form of a plan."""
    attends: bool
    """Whether its tokens meet in attention."""

    @property
    def inputs(self) -> dict[str, InputTree]:
        """What to split, in the form of a plan."""
        return {self.stream: SequenceParallelInput(self.dim), **self.tables}


class Trial:
    """A module run alone, with attention that keeps each token to itself."""

    def __init__(self, module: Module, call: BlockCall) -> None:
        self._module = module
        self._call = call
        self._queries: list[Tensor] = []
        self._reference = self._run(call.arguments)
        self.attends = bool(self._queries)

    def splits(self, size: int) -> list[Split]:
        """The ways to split a module over `size` ranks. One that attends has at most one: along the image's tokens,
        those of the longest argument if several hold some. Any other has one per dimension whose rows never meet."""
        output, least = self._call.output, max(size, 2) if self.attends else 2 * size
        shapes = [value.shape for value in (output_values(output) if self.attends else [output]) if _is_tensor(value)]
        found = [
            (not any(word in name for word in _TEXT), tensor.shape[dim], name, dim)
            for name, tensor in self._streams()
            for dim in range(tensor.ndim - 1)
            if tensor.shape in shapes and tensor.shape[dim] >= least and self._is_token_dim(name, dim)
        ]
        splits = (self._split_along(name, dim) for _, _, name, dim in (sorted(found)[-1:] if self.attends else found))
        return [split for split in splits if split is not None]

    def _streams(self) -> list[tuple[str, Tensor]]:
        given = self._call.arguments.items()
        return [(name, t) for name, t in given if _is_tensor(t) and t.is_floating_point() and t.ndim > 1]

    def _is_token_dim(self, name: str, dim: int) -> bool:
        """Whether rows along a dimension meet only in attention, or nowhere if there is none."""
        tensor = self._call.arguments[name]
        for index in (0, tensor.shape[dim] - 1):
            changed = zip(self._changed_by(name, tensor, dim, index, dim), self._reference, strict=True)
            rows = [rows for rows, before in changed if _is_tensor(before) and before.shape == tensor.shape]
            # Up to here any dimension passes that a block does not mix, the batch too. A token is one row of a query.
            queries = [query.isnan() for query in self._queries if query.isnan().any()]
            is_row = bool(queries) and all(q.movedim(-2, 0).flatten(1).any(1).sum() == 1 for q in queries)
            if [index] not in rows or any(len(changed) > 1 for changed in rows) or is_row != self.attends:
                return False
        return True

    def _split_along(self, stream: str, dim: int) -> Split | None:
        """How to split along a dimension; None if one token of another argument changes several tokens: experts that
        choose tokens by scores, say."""
        tensor = self._call.arguments[stream]
        with_tokens = [rows == [0] for rows in self._changed_by(stream, tensor, dim, 0, dim)]

        def rows_changed_by(name: str, leaf: Tensor, of: int, index: int) -> list[int] | None:
            try:
                rows = self._changed_by(name, leaf, of, index, dim)
            except (RuntimeError, IndexError, ValueError):  # A value that the module does not take, such as an index.
                return None
            return next((rows for rows, has in zip(rows, with_tokens, strict=True) if has and rows), [])

        tables: dict[str, InputTree] = {}
        for name, value in self._call.arguments.items():
            if name != stream:
                changed_by = partial(rows_changed_by, name)
                if not self.attends and any(_is_mixed(t, tensor.shape[dim], changed_by) for t in tree_leaves(value)):
                    return None
                specs = tree_map(partial(self._table, stream, tensor.shape[dim], changed_by), value)
                if any(spec is not None for spec in tree_leaves(specs)):
                    tables[name] = specs
        outputs: Any = [SequenceParallelOutput(dim) if has else None for has in with_tokens]
        outputs = outputs[0] if len(outputs) == 1 else outputs
        return Split(stream, dim, tensor.shape[dim], tables, outputs, self.attends)

    def _table(
        self, stream: str, tokens: int, changed_by: Callable[..., list[int] | None], leaf: Any
    ) -> SequenceParallelInput | SequenceParallelPartialInput | None:
        """How to split a tensor in an argument that has an entry per token; None for any other leaf."""
        for dim in range(leaf.ndim) if _is_tensor(leaf) else ():
            more = leaf.shape[dim] - tokens
            if more < 0:
                continue
            ends = changed_by(leaf, dim, 0), changed_by(leaf, dim, leaf.shape[dim] - 1)
            if not more and ends == ([0], [tokens - 1]):
                return SequenceParallelInput(dim)
            if more and ends in (([], [tokens - 1]), ([0], [])):
                texts = ((name, t) for name, t in self._streams() if name != stream and t.ndim > 2)
                source = next((name for name, t in texts if t.shape[1] == more), more)
                return SequenceParallelPartialInput(dim, source, text_first=ends[0] == [])
        return None

    def _changed_by(self, name: str, tensor: Tensor, dim: int, index: int, along: int) -> list[list[int]]:
        """For each output, its rows along a dimension that change with one row of a tensor in an argument."""
        changed = tensor.detach().clone()
        row = changed.select(dim, index)
        if tensor.is_floating_point() or tensor.is_complex():
            row.fill_(math.nan)
        elif tensor.dtype == torch.bool:
            row.logical_not_()
        else:
            row.copy_(torch.where(row == tensor.max(), tensor.min(), tensor.max()))
        value = tree_map(lambda leaf: changed if leaf is tensor else leaf, self._call.arguments[name])
        outputs = self._run({**self._call.arguments, name: value})
        return [_changed_rows(one, other, along) for one, other in zip(outputs, self._reference, strict=True)]

    def _run(self, arguments: Mapping[str, Any]) -> list[Any]:
        self._queries = []
        with torch.no_grad(), capturing(self._attend_alone, everywhere=True):
            return list(output_values(_call_again(self._module, self._call, arguments)))

    def _attend_alone(self, call: AttentionCall | RareCall) -> Any:
        """Attention in which each token sees only itself."""
        if isinstance(call, RareCall):
            with attention_through(None):
                return call.run_here()
        self._queries.append(call.query)
        output = call.query.mean(-1, keepdim=True).expand(*call.query.shape[:-1], call.value.shape[-1])
        if call.key.shape[-2] == call.query.shape[-2]:
            own = call.key.mean(-1, keepdim=True) + call.value
            output = output + own.repeat_interleave(output.shape[-3] // own.shape[-3], -3)
        return output.contiguous()


def _is_mixed(leaf: Any, tokens: int, changed_by: Callable[..., list[int] | None]) -> bool:
    """Whether one entry of a table with an entry per token changes several tokens."""
    dims = [dim for dim in range(leaf.ndim - 1) if leaf.shape[dim] == tokens] if _is_tensor(leaf) else []
    changed = (changed_by(leaf, dim, 0) for dim in dims)
    return any(rows is None or len(rows) > 1 for rows in changed)


def _call_again(module: Module, call: BlockCall, arguments: Mapping[str, Any]) -> Any:
    """Call a module as before, with other arguments."""
    values, named = list(arguments.values()), list(arguments.items())[call.num_positional :]
    return module(*values[: call.num_positional], **dict(named))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _changed_rows(one: Any, other: Any, dim: int) -> list[int]:
    if not _is_tensor(one) or one.ndim <= dim:
        return []
    apart = one.isnan() | ((one - other).abs() > 1e-4 * (1 + other.abs()))
    return [int(index) for index in apart.movedim(dim, 0).flatten(1).any(1).nonzero().flatten()]
