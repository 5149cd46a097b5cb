"""Where can a model be split of which nothing is known?

Its blocks are tried one by one, each alone: one token of what a block carries is changed, with attention leaving
each token by itself. If that one token of the output changes and no other, the block can be split along it.
Every other argument is tried the same way: what changes one token is a table with an entry for each, such as a
rotary embedding, and is split alike; the rest stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..arch import BlockStack
from ..arch.blocks import output_values
from ..arch.modules import unwrapped
from ..errors import ModelError
from ..trace.watch import BlockCall, Watcher
from .attention import AttentionCall
from .capture import attention_through
from .flex import FlexCall
from .plan import (
    InputTree,
    SequenceParallelInput,
    SequenceParallelModelPlan,
    SequenceParallelOutput,
    SequenceParallelPartialInput,
)

_TEXT = ("encoder", "text", "context", "txt", "prompt", "und_")
_Leaf = tuple[str | int, ...]
"""Where a tensor is among a block's arguments."""


@dataclass(frozen=True)
class StackSplit:
    """How one stack can be split."""

    stack: BlockStack
    first: str
    last: str
    stream: str
    """The parameter that carries the tokens."""
    dim: int
    tables: Mapping[str, InputTree]
    """Other parameters that have an entry for each token."""
    outputs: tuple[int, ...]
    """Which of the values that a block returns hold the tokens."""
    num_outputs: int
    length: int

    def plan(self, *, each_block: bool) -> SequenceParallelModelPlan:
        """Split at the first block and gather after the last, or around each block."""
        stream = {self.stream: SequenceParallelInput(self.dim)}
        outputs: Any = [
            SequenceParallelOutput(self.dim) if i in self.outputs else None for i in range(self.num_outputs)
        ]
        outputs = outputs[0] if self.num_outputs == 1 else outputs
        every = self.stack.pattern
        if each_block or self.first == self.last:
            gathers = dict.fromkeys(self.stack.block_paths, outputs)
            return {every: {**stream, **self.tables}, **gathers}
        tables = {every: dict(self.tables)} if self.tables else {}
        return {self.first: stream, **tables, self.last: outputs}


def split_stack(model: torch.nn.Module, stack: BlockStack, watched: Watcher, size: int) -> StackSplit:
    """How a stack can be split, found by trying its first block."""
    paths = [path for path in watched.blocks if path in stack.block_paths]
    block = unwrapped(model.get_submodule(paths[0]))
    call = watched.calls[paths[0]]
    trial = Trial(block, call, stack.path, stack.carried)
    stream, dim = trial.token_dim(size)
    tables = trial.tables()
    return StackSplit(
        stack=stack,
        first=paths[0],
        last=paths[-1],
        stream=stream,
        dim=dim,
        tables=tables,
        outputs=trial.outputs_with_tokens(),
        num_outputs=len(output_values(call.output)),
        length=call.arguments[stream].shape[dim],
    )


class Trial:
    """A block alone, with attention that leaves each token by itself."""

    def __init__(self, block: torch.nn.Module, call: BlockCall, path: str, carried: Collection[str]) -> None:
        """`carried`: the parameters that may hold tokens."""
        self._block = block
        self._call = call
        self._path = path
        self._carried = carried
        self._stream = ""
        self._dim = 0
        self._outputs: tuple[int, ...] = ()
        self._queries: list[torch.Tensor] = []
        self._reference = self._run(call.arguments)

    @property
    def attends(self) -> bool:
        """Whether there is any attention in the last run."""
        return bool(self._queries)

    def token_dim(self, size: int) -> tuple[str, int]:
        """The parameter that carries the image's tokens, the longest if there are several, and their dimension."""
        found: list[tuple[bool, int, str, int]] = []
        for name, tensor in self._call.arguments.items():
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.ndim < 2:
                continue
            if not any(
                isinstance(v, torch.Tensor) and v.shape == tensor.shape for v in output_values(self._call.output)
            ):
                continue
            for dim in range(tensor.ndim - 1):
                if tensor.shape[dim] >= max(size, 2) and self.is_token_dim(name, tensor, dim):
                    is_text = any(word in name for word in _TEXT)
                    found.append((not is_text, tensor.shape[dim], name, dim))
        if not found:
            raise ModelError(
                f"The blocks of {self._path!r} cannot be split: no argument of "
                f"{type(self._block).__name__} has a dimension of at least {size} along which tokens meet in attention "
                "only."
            )
        _, _, stream, dim = max(found)
        self.follow(stream, dim)
        return stream, dim

    def follow(self, stream: str, dim: int) -> None:
        """Take a parameter for the one that carries the tokens."""
        self._stream, self._dim = stream, dim
        self._outputs = self.outputs_with_tokens()

    def is_token_dim(self, name: str, tensor: torch.Tensor, dim: int, *, attends: bool = True) -> bool:
        """Whether rows along a dimension meet in attention only, or, where there is none, nowhere."""
        for index in (0, tensor.shape[dim] - 1):
            outputs = self._run(self._changed((name,), tensor, dim, index))
            shaped = [i for i, v in enumerate(outputs) if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
            rows = [_changed_rows(outputs[i], self._reference[i], dim) for i in shaped]
            # Any dimension that a block does not mix passes so far, the batch too. A token is one row of a query.
            queries = [query.isnan() for query in self._queries if query.isnan().any()]
            is_row = bool(queries) and all(q.movedim(-2, 0).flatten(1).any(1).sum() == 1 for q in queries)
            if [index] not in rows or any(len(changed) > 1 for changed in rows) or is_row != attends:
                return False
        return True

    def tables(self) -> dict[str, InputTree]:
        """How arguments are split that have an entry for each token."""
        tables: dict[str, InputTree] = {}
        for leaf, tensor in _leaves(self._call.arguments):
            if leaf[0] != self._stream and tensor.ndim:
                found = self.table(leaf, tensor)
                if found is not None:
                    _insert(tables, leaf, found, self._call.arguments)
        return tables

    def table(self, leaf: _Leaf, tensor: torch.Tensor) -> Any:
        """How an argument is split that has an entry for each token; None for one that has not."""
        tokens = self._call.arguments[self._stream].shape[self._dim]
        for dim in range(tensor.ndim):
            rows = tensor.shape[dim]
            if rows < tokens:
                continue
            first, last = (self._rows_changed_by(leaf, tensor, dim, index) for index in (0, rows - 1))
            if rows == tokens and first == [0] and last == [tokens - 1]:
                return SequenceParallelInput(dim)
            if rows > tokens and first == [] and last == [tokens - 1]:
                return SequenceParallelPartialInput(dim, self._text_source(rows - tokens))
            if rows > tokens and first == [0] and last == []:
                return SequenceParallelPartialInput(dim, self._text_source(rows - tokens), text_first=False)
        return None

    def mixes_by_others(self) -> bool:
        """Whether one token of another argument changes several: a choice of tokens by scores, say."""
        tokens = self._call.arguments[self._stream].shape[self._dim]
        for leaf, tensor in _leaves(self._call.arguments):
            for dim in range(tensor.ndim - 1):
                if leaf[0] != self._stream and tensor.shape[dim] == tokens:
                    changed = self._rows_changed_by(leaf, tensor, dim, 0)
                    if changed is None or len(changed) > 1:
                        return True
        return False

    def outputs_with_tokens(self) -> tuple[int, ...]:
        """Which returned values change with the tokens of the stream."""
        tensor = self._call.arguments[self._stream]
        outputs = self._run(self._changed((self._stream,), tensor, self._dim, 0))
        return tuple(
            place
            for place, (one, other) in enumerate(zip(outputs, self._reference, strict=True))
            if isinstance(one, torch.Tensor) and one.ndim > self._dim and _changed_rows(one, other, self._dim) == [0]
        )

    def _rows_changed_by(self, leaf: _Leaf, tensor: torch.Tensor, dim: int, index: int) -> list[int] | None:
        try:
            outputs = self._run(self._changed(leaf, tensor, dim, index))
        except (RuntimeError, IndexError, ValueError):  # A value that the block does not take, such as an index.
            return None
        rows = [_changed_rows(outputs[place], self._reference[place], self._dim) for place in self._outputs]
        return next((changed for changed in rows if changed), [])

    def _text_source(self, length: int) -> str | int:
        """What tells how many tokens of a table are not the stream's."""
        for name, value in self._call.arguments.items():
            is_stream = isinstance(value, torch.Tensor) and name != self._stream and name in self._carried
            if is_stream and value.ndim > 2 and value.shape[1] == length:
                return name
        return length

    def _changed(self, leaf: _Leaf, tensor: torch.Tensor, dim: int, index: int) -> dict[str, Any]:
        changed = tensor.detach().clone()
        row = changed.select(dim, index)
        if tensor.is_floating_point() or tensor.is_complex():
            row.fill_(math.nan)
        elif tensor.dtype == torch.bool:
            row.logical_not_()
        else:
            row.copy_(torch.where(row == tensor.max(), tensor.min(), tensor.max()))
        name = str(leaf[0])
        return {**self._call.arguments, name: _replaced(self._call.arguments[name], leaf[1:], changed)}

    def _run(self, arguments: Mapping[str, Any]) -> list[Any]:
        self._queries = []
        with torch.no_grad(), attention_through(self._by_itself, everywhere=True):
            values, count = list(arguments.values()), self._call.num_positional
            named = dict(list(arguments.items())[count:])
            return list(output_values(self._block(*values[:count], **named)))

    def _by_itself(self, call: AttentionCall) -> torch.Tensor:
        if isinstance(call, FlexCall):
            raise ModelError(f"The blocks of {self._path!r} cannot be split: their flex attention has a mask.")
        self._queries.append(call.query)
        output = call.query.mean(-1, keepdim=True).expand(*call.query.shape[:-1], call.value.shape[-1])
        if call.key.shape[-2] == call.query.shape[-2]:
            own = call.key.mean(-1, keepdim=True) + call.value
            if own.shape[-3] != output.shape[-3]:
                own = own.repeat_interleave(output.shape[-3] // own.shape[-3], -3)
            output = output + own
        return output.contiguous()


def _changed_rows(one: Any, other: Any, dim: int) -> list[int]:
    if not isinstance(one, torch.Tensor):
        return []
    apart = one.isnan() | ((one - other).abs() > 1e-4 * (1 + other.abs()))
    marks = apart.movedim(dim, 0).flatten(1).any(1)
    return [int(index) for index in marks.nonzero().flatten()]


def _leaves(value: Any, path: _Leaf = ()) -> Iterator[tuple[_Leaf, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _leaves(part, (*path, index))


def _replaced(value: Any, path: _Leaf, tensor: torch.Tensor) -> Any:
    if not path:
        return tensor
    if isinstance(value, dict):
        return {k: _replaced(part, path[1:], tensor) if k == path[0] else part for k, part in value.items()}
    parts = [_replaced(part, path[1:], tensor) if i == path[0] else part for i, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _insert(tables: dict[str, InputTree], leaf: _Leaf, spec: Any, arguments: Mapping[str, Any]) -> None:
    """Put a spec at its place in a tree of the same form as the argument."""

    def tree(value: Any, path: _Leaf, known: Any) -> Any:
        if not path:
            return spec
        if isinstance(value, dict):
            known = known or {}
            return {**known, path[0]: tree(value[path[0]], path[1:], known.get(path[0]))}
        known = known or [None] * len(value)
        return [tree(part, path[1:], known[i]) if i == path[0] else known[i] for i, part in enumerate(value)]

    name = str(leaf[0])
    tables[name] = tree(arguments[name], leaf[1:], tables.get(name))
