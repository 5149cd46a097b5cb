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
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ..trace.forward import BlockCall, Watcher
from ..trace.twin import TrialFailed, trial
from .attention import AttentionCall
from .capture import attention_through, capturing
from .plan import (
    InputTree,
    SequenceParallelInput,
    SequenceParallelModelPlan,
    SequenceParallelOutput,
    SequenceParallelPartialInput,
    inputs_in,
)

_TEXT = ("encoder", "text", "context", "txt", "prompt", "und_")
"""Words in the names of arguments that hold conditioning."""
_MIXED: Any = object()
"""Stands for a table of which an entry changes several tokens."""


class Candidate(NamedTuple):
    """A plan that may fit."""

    source: str
    plan: SequenceParallelModelPlan
    shares_attention: bool = False
    """Whether ranks share the work of attentions whose tokens are not split."""


@dataclass(frozen=True)
class Split:
    """One way to split a module."""

    inputs: Mapping[str, InputTree]
    """What to split, as in a plan: the parameter that carries the tokens, then those with an entry per token."""
    outputs: Any
    """What to gather, in the form of a plan."""
    dim: int
    length: int
    """Number of tokens."""
    attends: bool
    """Whether its tokens meet in attention."""


class Site(NamedTuple):
    """Blocks of a stack, or the modules of one name in them, and how to split them."""

    stack: str
    pattern: str
    paths: Sequence[str]
    """In the order in which they ran."""
    split: Split


def candidates(
    model: Module, anatomy: Anatomy, watched: Watcher, size: int, rejected: dict[str, str]
) -> Iterator[Candidate]:
    """Plans derived from what a forward did with the blocks. `rejected` gets the reason for each stack that has none.
    All ranks get the same, in the same order."""
    ran = [stack for stack in anatomy.stacks if any(path in watched.calls for path in stack.block_paths)]
    for find, ways in (
        (_whole_blocks, {"split once": False, "split at each block": True}),
        (partial(_inside_blocks, attends=True), {"split inside blocks": True}),
        (partial(_inside_blocks, attends=False), {"split inside blocks, attention shared": True}),
    ):
        found: list[list[Site]] = []
        for stack in ran:
            with _noting_failure(rejected, f"{stack.path} ({next(iter(ways))})"):
                found.append(find(model, stack, watched, size))
        longest = max((sites[0].split.length for sites in found), default=0)
        found = [sites for sites in found if 2 * sites[0].split.length >= longest]
        alone = [[sites] for sites in reversed(found)] if len(found) > 1 else []
        for group in [found, *alone] if found else []:
            names = ", ".join(sites[0].stack for sites in group)
            for how, each_block in ways.items():
                plan = _plan_of(itertools.chain.from_iterable(group), each_block=each_block)
                yield Candidate(f"derived for {names} ({how})", plan, shares_attention=find is not _whole_blocks)
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


def _plan_of(sites: Iterable[Site], *, each_block: bool) -> SequenceParallelModelPlan:
    """Split around each module, or at the first one, and gather after the last."""
    plan: SequenceParallelModelPlan = {}
    for _, pattern, paths, split in sites:
        if each_block or len(set(paths)) == 1:
            plan |= {pattern: split.inputs, **dict.fromkeys(paths, split.outputs)}
            continue
        (stream, spec), *tables = split.inputs.items()
        plan |= {paths[0]: {stream: spec}, **({pattern: dict(tables)} if tables else {}), paths[-1]: split.outputs}
    return plan


# ------------------------------------------------------------------------------------------------ where to split


def _whole_blocks(model: Module, stack: BlockStack, watched: Watcher, size: int) -> list[Site]:
    """How to split the blocks of a stack, found by trying the first one."""
    paths = [path for path in watched.blocks if path in stack.block_paths]
    block = unwrapped(model.get_submodule(paths[0]))
    tried = Trial(block, watched.calls[paths[0]])
    split = next(tried.splits(size), None) if tried.attends else None
    if split is None:
        raise ModelError(
            f"The blocks of {stack.path!r} cannot be split: no argument of {type(block).__name__} has a dimension of "
            f"at least {size} along which tokens interact through attention only."
        )
    return [Site(stack.path, stack.pattern, paths, split)]


def _inside_blocks(model: Module, stack: BlockStack, watched: Watcher, size: int, *, attends: bool) -> list[Site]:
    """How to split modules of the blocks, found by trying those of the first one. With `attends`, along the sequences
    of the longest attentions; else attention stays whole."""
    paths = list(dict.fromkeys(path for path in watched.blocks if path in stack.block_paths))
    first, *others = (unwrapped(model.get_submodule(path)) for path in paths)
    splits = _longest(_splits_of_children(first, watched.calls[paths[0]], size), attends=attends)
    sites = [
        Site(stack.path, f"{stack.pattern}.{name}", [f"{path}.{name}" for path in paths], split)
        for name, split in splits.items()
        # One key splits the inputs of all blocks, so all must have such a module.
        if all(type(getattr(block, name, None)) is type(getattr(first, name)) for block in others)
    ]
    if not sites:
        where = "meet only in attention" if attends else "do not meet"
        raise ModelError(f"No module in the blocks of {stack.path!r} has tokens that {where}.")
    return sites


def _longest(by_name: dict[str, list[Split]], *, attends: bool) -> dict[str, Split]:
    """The splits along a long sequence: that of an attention, with `attends`."""
    sequences = {(s.length, s.dim) for splits in by_name.values() for s in splits if s.attends == attends}
    longest, _ = max(sequences, default=(0, 0))
    return {
        name: split
        for name, splits in by_name.items()
        for split in reversed(splits)
        if attends >= split.attends and (split.length, split.dim) in sequences and 2 * split.length >= longest
    }


def _splits_of_children(block: Module, call: BlockCall, size: int) -> dict[str, list[Split]]:
    """For each module of a block, the ways to split it. Each is tried right after its first call in a run of the block:
    then its weights are where they must be."""
    found: dict[str, list[Split]] = {}

    def attempt(name: str, module: Module, args: Any, kwargs: Any, output: Any) -> None:
        if name in found:
            return
        found[name] = []
        arguments = dict(zip(parameters_of(module), args, strict=False)) | kwargs
        with _noting_failure({}, name):
            tried = Trial(module, BlockCall(arguments, len(args), output))
            found[name] = list(itertools.islice(tried.splits(size), 1 if tried.attends else None))

    with contextlib.ExitStack() as removals, torch.no_grad():
        for name, module in block.named_children():
            if any(parameter.ndim > 1 for parameter in module.parameters()):
                hook = partial(attempt, name)
                removals.enter_context(unwrapped(module).register_forward_hook(hook, with_kwargs=True))
        _call_again(block, call, call.arguments)
    return found


# ------------------------------------------------------------------------------------------------ one module


class Trial:
    """A module run alone, with attention that keeps each token to itself."""

    def __init__(self, module: Module, call: BlockCall) -> None:
        self._module = module
        self._call = call
        self._queries: list[Tensor] = []
        self._reference = self._run(call.arguments)
        self.attends = bool(self._queries)
        given = call.arguments.items()
        self._streams = [(n, t) for n, t in given if isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 1]

    def splits(self, size: int) -> Iterator[Split]:
        """The ways to split a module over `size` ranks. One that attends can be split along any tokens, those of the
        image and of the longest argument first. Any other can be along each dimension whose rows never meet."""
        least = max(size, 2) if self.attends else 2 * size
        outputs = output_values(self._call.output) if self.attends else [self._call.output]
        shapes = [value.shape for value in outputs if isinstance(value, Tensor)]
        possible = [
            (not any(word in name for word in _TEXT), tensor.shape[dim], name, dim)
            for name, tensor in self._streams
            for dim in range(tensor.ndim - 1)
            if tensor.shape in shapes and tensor.shape[dim] >= least
        ]
        for _, length, stream, dim in sorted(possible, reverse=True):
            has_tokens = self._outputs_with_tokens(stream, dim)
            inputs = self._inputs(stream, dim, length, has_tokens) if any(has_tokens) else None
            if inputs is not None:
                gather = [SequenceParallelOutput(dim) if has else None for has in has_tokens]
                yield Split(inputs, gather[0] if len(gather) == 1 else gather, dim, length, self.attends)

    def _outputs_with_tokens(self, stream: str, dim: int) -> list[bool]:
        """Which outputs hold the rows along a dimension of an argument; none if rows meet elsewhere than in attention,
        or at all if there is none."""
        tensor, has_tokens = self._call.arguments[stream], []
        for index in (tensor.shape[dim] - 1, 0):
            changed = self._changed_by(stream, tensor, dim, index, dim)
            # Up to here any dimension passes that a block does not mix, the batch too. A token is one row of a query.
            queries = [query.isnan() for query in self._queries if query.isnan().any()]
            is_row = bool(queries) and all(q.movedim(-2, 0).flatten(1).any(1).sum() == 1 for q in queries)
            if [index] not in changed or any(len(rows) > 1 for rows in changed) or is_row != self.attends:
                return []
            has_tokens = [rows == [index] for rows in changed]
        return has_tokens

    def _inputs(self, stream: str, dim: int, length: int, has_tokens: list[bool]) -> dict[str, InputTree] | None:
        """What to split with the tokens; None if an entry of another argument changes several of them: experts that
        choose tokens by scores, say."""

        def changed_by(name: str, leaf: Tensor, of: int, index: int) -> list[int] | None:
            """The tokens that change with one entry; None for a value that the module does not take."""
            try:
                changed = self._changed_by(name, leaf, of, index, dim)
            except (RuntimeError, IndexError, ValueError):
                return None
            return next((rows for rows, has in zip(changed, has_tokens, strict=True) if has and rows), [])

        def table(name: str, leaf: Any) -> Any:
            """How to split a tensor in an argument that has an entry per token; None for any other leaf."""
            for of in range(leaf.ndim) if isinstance(leaf, Tensor) else ():
                more = leaf.shape[of] - length
                if more < 0:
                    continue
                ends = changed_by(name, leaf, of, 0), changed_by(name, leaf, of, leaf.shape[of] - 1)
                if not more and ends == ([0], [length - 1]):
                    return SequenceParallelInput(of)
                if more and ends in (([], [length - 1]), ([0], [])):
                    texts = ((n, t) for n, t in self._streams if n != stream and t.ndim > 2)
                    source = next((n for n, t in texts if t.shape[1] == more), more)
                    return SequenceParallelPartialInput(of, source, text_first=ends[0] == [])
                if not more and not self.attends and of < leaf.ndim - 1 and (ends[0] is None or len(ends[0]) > 1):
                    return _MIXED
            return None

        inputs: dict[str, InputTree] = {stream: SequenceParallelInput(dim)}
        for name, value in self._call.arguments.items():
            specs = tree_map(partial(table, name), value) if name != stream else None
            if _MIXED in tree_leaves(specs):
                return None
            if inputs_in(specs):
                inputs[name] = specs
        return inputs

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

    def _attend_alone(self, call: AttentionCall) -> Any:
        """Attention in which each token sees only itself."""
        if call.rare:
            with attention_through(None):
                return call.run_here()
        self._queries.append(call.query)
        output = call.query.mean(-1, keepdim=True).expand(*call.query.shape[:-1], call.value.shape[-1])
        if call.key.shape[-2] == call.query.shape[-2]:
            output = output + call.key.mean((-3, -1), keepdim=True) + call.value.mean(-3, keepdim=True)
        return output.contiguous()


def _call_again(module: Module, call: BlockCall, arguments: Mapping[str, Any]) -> Any:
    """Call a module as before, with other arguments."""
    values, named = list(arguments.values()), list(arguments.items())[call.num_positional :]
    return module(*values[: call.num_positional], **dict(named))


def _changed_rows(one: Any, other: Any, dim: int) -> list[int]:
    if not isinstance(one, Tensor) or one.ndim <= dim:
        return []
    apart = one.isnan() | ((one - other).abs() > 1e-4 * (1 + other.abs()))
    return [int(index) for index in apart.movedim(dim, 0).flatten(1).any(1).nonzero().flatten()]
