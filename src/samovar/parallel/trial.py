"""Along which dimension of which argument can a module be split?

The module is run alone, with one token of an argument changed (to NaN) and attention that keeps each token to itself.
If that one token of the output changes and no other, the module can be split along it. Every other argument is tried
the same way: one that changes a single token is a table with an entry per token, such as a rotary embedding, and is
split with the tokens; the rest stays whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..arch.blocks import output_values
from ..core.errors import ModelError
from ..trace.watch import BlockCall
from .attention import AttentionCall
from .capture import FlexCall, capturing
from .plan import InputTree, SequenceParallelInput, SequenceParallelOutput, SequenceParallelPartialInput

_TEXT = ("encoder", "text", "context", "txt", "prompt", "und_")


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

    def __init__(self, module: torch.nn.Module, call: BlockCall, carried: Collection[str]) -> None:
        """`carried`: the parameters that may hold tokens."""
        self._module = module
        self._call = call
        self._carried = carried
        self._stream, self._dim = "", 0
        self._outputs: list[int] = []
        self._queries: list[torch.Tensor] = []
        self._reference = self._run(call.arguments)
        self.attends = bool(self._queries)

    def splits(self, size: int) -> list[Split]:
        """The ways to split a module over `size` ranks. One that attends has at most one: along the image's tokens,
        those of the longest argument if several hold some. Any other has one per dimension whose rows never meet."""
        output, least = self._call.output, max(size, 2) if self.attends else 2 * size
        returned = output_values(output) if self.attends else [output]
        shapes = [value.shape for value in returned if isinstance(value, torch.Tensor)]
        found = [
            (not any(word in name for word in _TEXT), tensor.shape[dim], name, dim)
            for name, tensor in self._streams()
            for dim in range(tensor.ndim - 1)
            if tensor.shape in shapes and tensor.shape[dim] >= least and self._is_token_dim(name, dim)
        ]
        splits = []
        for _, _, name, dim in sorted(found)[-1:] if self.attends else found:
            split = self._split_along(name, dim)
            if self.attends or not self._mixes_by_others():
                splits.append(split)
        return splits

    def _streams(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, value)
            for name, value in self._call.arguments.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1
        ]

    def _is_token_dim(self, name: str, dim: int) -> bool:
        """Whether rows along a dimension meet only in attention, or nowhere if there is none."""
        tensor = self._call.arguments[name]
        for index in (0, tensor.shape[dim] - 1):
            outputs = self._run(self._changed(name, tensor, dim, index))
            shaped = [i for i, v in enumerate(outputs) if isinstance(v, torch.Tensor) and v.shape == tensor.shape]
            rows = [_changed_rows(outputs[i], self._reference[i], dim) for i in shaped]
            # Up to here any dimension passes that a block does not mix, the batch too. A token is one row of a query.
            queries = [query.isnan() for query in self._queries if query.isnan().any()]
            is_row = bool(queries) and all(q.movedim(-2, 0).flatten(1).any(1).sum() == 1 for q in queries)
            if [index] not in rows or any(len(changed) > 1 for changed in rows) or is_row != self.attends:
                return False
        return True

    def _split_along(self, stream: str, dim: int) -> Split:
        tensor = self._call.arguments[stream]
        changed = zip(self._run(self._changed(stream, tensor, dim, 0)), self._reference, strict=True)
        with_tokens = [
            isinstance(one, torch.Tensor) and one.ndim > dim and _changed_rows(one, other, dim) == [0]
            for one, other in changed
        ]
        self._stream, self._dim, self._outputs = stream, dim, [i for i, has in enumerate(with_tokens) if has]
        outputs: Any = [SequenceParallelOutput(dim) if has else None for has in with_tokens]
        tables = {}
        for name, value in self._call.arguments.items():
            if name != stream:
                specs = tree_map(partial(self._table, name), value)
                if any(spec is not None for spec in tree_leaves(specs)):
                    tables[name] = specs
        outputs = outputs[0] if len(outputs) == 1 else outputs
        return Split(stream, dim, tensor.shape[dim], tables, outputs, self.attends)

    def _table(self, name: str, leaf: Any) -> SequenceParallelInput | SequenceParallelPartialInput | None:
        """How to split a tensor in an argument that has an entry per token; None for any other leaf."""
        tokens = self._call.arguments[self._stream].shape[self._dim]
        for dim in range(leaf.ndim) if isinstance(leaf, torch.Tensor) else ():
            rows = leaf.shape[dim]
            if rows < tokens:
                continue
            first, last = (self._rows_changed_by(name, leaf, dim, index) for index in (0, rows - 1))
            if rows == tokens and first == [0] and last == [tokens - 1]:
                return SequenceParallelInput(dim)
            if rows > tokens and first == [] and last == [tokens - 1]:
                return SequenceParallelPartialInput(dim, self._text_source(rows - tokens))
            if rows > tokens and first == [0] and last == []:
                return SequenceParallelPartialInput(dim, self._text_source(rows - tokens), text_first=False)
        return None

    def _text_source(self, length: int) -> str | int:
        """The parameter that holds the tokens of a table that are not the stream's, or their number."""
        for name, value in self._streams():
            if name != self._stream and name in self._carried and value.ndim > 2 and value.shape[1] == length:
                return name
        return length

    def _mixes_by_others(self) -> bool:
        """Whether one token of another argument changes several: experts that choose tokens by scores, say."""
        tokens = self._call.arguments[self._stream].shape[self._dim]
        for name, value in self._call.arguments.items():
            for leaf in tree_leaves(value) if name != self._stream else ():
                for dim in range(leaf.ndim - 1) if isinstance(leaf, torch.Tensor) else ():
                    if leaf.shape[dim] == tokens:
                        changed = self._rows_changed_by(name, leaf, dim, 0)
                        if changed is None or len(changed) > 1:
                            return True
        return False

    def _rows_changed_by(self, name: str, leaf: torch.Tensor, dim: int, index: int) -> list[int] | None:
        try:
            outputs = self._run(self._changed(name, leaf, dim, index))
        except (RuntimeError, IndexError, ValueError):  # A value that the module does not take, such as an index.
            return None
        rows = [_changed_rows(outputs[place], self._reference[place], self._dim) for place in self._outputs]
        return next((changed for changed in rows if changed), [])

    def _changed(self, name: str, tensor: torch.Tensor, dim: int, index: int) -> dict[str, Any]:
        """The arguments, with one row of a tensor in one of them changed."""
        changed = tensor.detach().clone()
        row = changed.select(dim, index)
        if tensor.is_floating_point() or tensor.is_complex():
            row.fill_(math.nan)
        elif tensor.dtype == torch.bool:
            row.logical_not_()
        else:
            row.copy_(torch.where(row == tensor.max(), tensor.min(), tensor.max()))
        value = tree_map(lambda leaf: changed if leaf is tensor else leaf, self._call.arguments[name])
        return {**self._call.arguments, name: value}

    def _run(self, arguments: Mapping[str, Any]) -> list[Any]:
        self._queries = []
        with torch.no_grad(), capturing(self._attend_alone, everywhere=True):
            return list(output_values(call_again(self._module, self._call, arguments)))

    def _attend_alone(self, call: AttentionCall) -> torch.Tensor:
        """Attention in which each token sees only itself."""
        if isinstance(call, FlexCall):
            raise ModelError(f"{type(self._module).__name__} cannot be split: its flex attention has a mask.")
        self._queries.append(call.query)
        output = call.query.mean(-1, keepdim=True).expand(*call.query.shape[:-1], call.value.shape[-1])
        if call.key.shape[-2] == call.query.shape[-2]:
            own = call.key.mean(-1, keepdim=True) + call.value
            if own.shape[-3] != output.shape[-3]:
                own = own.repeat_interleave(output.shape[-3] // own.shape[-3], -3)
            output = output + own
        return output.contiguous()


def call_again(module: torch.nn.Module, call: BlockCall, arguments: Mapping[str, Any]) -> Any:
    """Call a module as before, with other arguments."""
    values, named = list(arguments.values()), list(arguments.items())[call.num_positional :]
    return module(*values[: call.num_positional], **dict(named))


def _changed_rows(one: Any, other: Any, dim: int) -> list[int]:
    if not isinstance(one, torch.Tensor):
        return []
    apart = one.isnan() | ((one - other).abs() > 1e-4 * (1 + other.abs()))
    marks = apart.movedim(dim, 0).flatten(1).any(1)
    return [int(index) for index in marks.nonzero().flatten()]
