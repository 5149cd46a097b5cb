"""Where are the outputs that were computed ahead, and which of them belong to a call of the model?

Each step has a row of bytes on the host: what its time-only layers return, and what they are given, to be compared. A
step is found by its key: the bits of the time, guidance and pooled text that the model is given. All of it is true as
long as the weights are what they were.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import is_
from typing import Any, NamedTuple

import torch

from ..core.tensor_parts import bits, take_apart
from ..trace.tape import Form, Tape
from .coded import version_of
from .staging import Stage
from .weights import ALIGNMENT, extent

_MOST_KEPT = 2**29
"""Bytes of rows that are kept of each form of call."""
_MOST_MISSES = 2
"""Guesses of what comes next that may fail in a row."""
_FEW, _MANY = 16, 1024
"""Numbers of each weight that are looked at in each forward, and in each run, for changes that torch does not count."""
Fetch = Callable[[str], AbstractContextManager[torch.nn.Module]]


class Part(NamedTuple):
    """Where a tensor is in a row."""

    start: int
    form: Form

    @property
    def end(self) -> int:
        return self.start + self.form.num_bytes

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """Its bytes in a row."""
        return row[self.start : self.end]

    def view(self, row: torch.Tensor) -> torch.Tensor:
        """The tensor in a row."""
        return self.of(row).view(self.form.dtype).view(self.form.shape)


class KnownSteps:
    """The steps of one form of call whose outputs are known."""

    def __init__(self, tape: Tape, ids: Sequence[int]) -> None:
        """`ids`: the identity of the layer of each call."""
        self.tape = tape
        self.is_proved = False
        """Whether a forward of this run has shown that the layers are given what was expected."""
        self.calls: dict[int, list[int]] = {}
        """By the identity of a layer: the numbers of its calls."""
        for number, identity in enumerate(ids):
            self.calls.setdefault(identity, []).append(number)
        self.num_calls = len(ids)
        self.kinds: Sequence[int] = range(len(ids))
        """By call: a number that calls have in common which are given the same."""
        self._size = 0
        returned = [call.returns for call in tape.layer_calls if call.returns is not None]
        assert len(returned) == len(ids)
        self.outputs = [self._place(form, ALIGNMENT) for form in returned]
        self._inputs_at = self._size
        self.inputs = [[self._place(form) for form in call.given] for call in tape.layer_calls]
        """They lie together, to be compared at once."""
        self.forms = [[(form.shape, form.dtype) for form in call.given] for call in tape.layer_calls]
        dtypes = {form.dtype for form in returned}
        self._dtype = dtypes.pop() if len(dtypes) == 1 else None
        self._keys: torch.Tensor | None = None
        self._rows: list[torch.Tensor] = []
        self._misses = 0

    def _place(self, form: Form, alignment: int = 1) -> Part:
        part = Part(self._size, form)
        self._size += -(-form.num_bytes // alignment) * alignment
        return part

    def outputs_in(self, row: torch.Tensor) -> Sequence[torch.Tensor]:
        """The output of each call. This is quick: it happens in every forward."""
        if self._dtype is None:
            return [part.view(row) for part in self.outputs]
        width = self._dtype.itemsize
        ends = [part.start // width for part in self.outputs[1:]] + [self._inputs_at // width]
        sizes = [end - part.start // width for part, end in zip(self.outputs, ends, strict=True)]
        pieces = row[: self._inputs_at].view(self._dtype).split_with_sizes(sizes)
        counts = [part.form.num_bytes // width for part in self.outputs]
        return [
            (piece if size == count else piece[:count]).view(part.form.shape)
            for piece, size, count, part in zip(pieces, sizes, counts, self.outputs, strict=True)
        ]

    def expected_in(self, row: torch.Tensor, numbers: Sequence[int]) -> torch.Tensor:
        """What the calls of these numbers are to be given, as bytes."""
        if len(numbers) == self.num_calls and all(n == i for i, n in enumerate(numbers)):
            return row[self._inputs_at :]
        return torch.cat([row[part.start : part.end] for number in numbers for part in self.inputs[number]])

    @property
    def is_guessing(self) -> bool:
        """Whether it is worth to compute what may come."""
        return self._misses < _MOST_MISSES

    def find(self, key: torch.Tensor) -> torch.Tensor | None:
        """The row of the step with this key. This waits for the device."""
        if self._keys is None:
            return None
        found = (self._keys == key).all(1).tolist()
        if True not in found:
            self._misses += 1
            return None
        self._misses = 0
        return self._rows[found.index(True)]

    def compute(
        self, model: torch.nn.Module, steps: Sequence[Sequence[torch.Tensor]], fetch: Fetch, stage: Stage
    ) -> torch.Tensor:
        """Compute the layers for some steps. The row of the first is returned."""
        with torch.inference_mode(False):
            is_pinned = stage.device.type == "cuda"
            made = torch.empty(len(steps) * self._size, dtype=torch.uint8, pin_memory=is_pinned)
            rows = torch.empty(len(steps), self._size, dtype=torch.uint8, pin_memory=is_pinned)
        layers = iter(zip(self.outputs, self.inputs, strict=True))
        for given, outputs in self.tape.play(model, steps, fetch):
            output, inputs = next(layers)
            for part, tensors in zip((output, *inputs), (outputs, *zip(*given, strict=True)), strict=True):
                # All steps of a part lie together at first, as one copy that nobody waits for.
                target = made[len(steps) * part.start :][: len(steps) * part.form.num_bytes]
                target.copy_(bits_of(tensors), non_blocking=True)
        keys = torch.stack([key_of(step) for step in steps])
        stage.host_waits(stage.mark_computed())
        for part in (*self.outputs, *itertools.chain(*self.inputs)):
            piece = made[len(steps) * part.start :][: len(steps) * part.form.num_bytes]
            rows[:, part.start : part.end] = piece.view(len(steps), -1)
        kinds: dict[bytes, int] = {}
        given_bytes = [b"".join(rows[0, p.start : p.end].numpy().tobytes() for p in parts) for parts in self.inputs]
        self.kinds = [kinds.setdefault(one, len(kinds)) for one in given_bytes]
        most = max(_MOST_KEPT // max(self._size, 1), len(steps))
        self._rows = [*rows, *self._rows][:most]
        self._keys = (keys if self._keys is None else torch.cat([keys, self._keys]))[:most]
        return self._rows[0]


class SeenWeights:
    """The weights of a layer as they were."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self._tensors, self._edits = self._held()
        self._places = [_place(tensor) for tensor in self._tensors]
        flats = [
            tensor.detach().as_strided((extent(tensor) // tensor.element_size(),), (1,)).view(torch.uint8)
            for tensor in self._tensors
        ]
        self._probes = [
            [flat[:: max(flat.numel() // count, 1) | 1].numpy() for flat in flats] for count in (_FEW, _MANY)
        ]
        self._values = [[probe.tobytes() for probe in probes] for probes in self._probes]

    def _held(self) -> tuple[list[torch.Tensor], list[int]]:
        """What the weights are made of, and the counted changes of wrappers."""
        parts = take_apart(tensor for tensor in self._layer._parameters.values() if tensor is not None)
        return parts.plain, [version_of(wrapper.tensor) for wrapper in parts.wrappers]

    def is_same(self, is_new_run: bool) -> bool:
        """Whether nobody has changed them, as far as counts and samples tell."""
        held, edits = self._held()
        return (
            len(held) == len(self._tensors)
            and edits == self._edits
            and all(map(is_, held, self._tensors))
            and [_place(tensor) for tensor in held] == self._places
            and [probe.tobytes() for probe in self._probes[is_new_run]] == self._values[is_new_run]
        )


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), version_of(tensor), tensor.shape, tensor.stride(), tensor.dtype


def key_of(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bits of what the model is given at a step."""
    return torch.cat([bits(tensor) for tensor in inputs]) if inputs else torch.zeros(0, dtype=torch.uint8)


def bits_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some tensors as bytes, one after the other."""
    first = tensors[0]
    if all(tensor.dtype is first.dtype and tensor.shape == first.shape for tensor in tensors):
        return bits(torch.stack(tuple(tensors)))
    return torch.cat([bits(tensor) for tensor in tensors])
