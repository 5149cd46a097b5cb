"""Tensors and the memory under them: overlap, layout, what several groups share, and what cannot be moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.core.errors import ModelError
from samovar.offload.weights import (
    ALIGNMENT,
    LEAST_PIECE,
    LINE,
    Span,
    check_movable,
    extent,
    lay_out,
    owners_of,
    shared_tensors,
    spans_of,
    tensors_of,
)


def test_tensors_of_a_module_each_once_less_what_is_left_out() -> None:
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner, inner, torch.nn.BatchNorm1d(2))
    found = tensors_of(outer)
    assert [id(t) for t in found] == [id(t) for t in (*inner.parameters(), *outer[2].parameters(), *outer[2].buffers())]
    assert [id(t) for t in tensors_of(outer, {id(inner)})] == [id(t) for t in found[2:]]
    assert id(inner.bias) not in map(id, tensors_of(outer, {id(inner.bias)}))


def test_owners_hold_tensors_themselves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Sequential(torch.nn.LayerNorm(2)))
    assert owners_of(model) == [model[0], model[2][0]]
    assert owners_of(model, {id(model[0].weight), id(model[0].bias)}) == [model[2][0]]
    assert owners_of(model, {id(model[2])}) == [model[0]]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 4), 48),
        (torch.zeros(3, 4).t(), 48),
        (torch.zeros(1, 4).expand(3, 4), 16),
        (torch.zeros(3, 8)[:, :4], (2 * 8 + 4) * 4),
        (torch.zeros(0, 4), 0),
        (torch.zeros((), dtype=torch.int64), 8),
    ],
    ids=["contiguous", "transposed", "expanded", "gaps", "empty", "scalar"],
)
def test_extent(tensor: torch.Tensor, expected: int) -> None:
    assert extent(tensor) == expected


def test_tensors_that_overlap_share_a_span() -> None:
    memory = torch.zeros(100)
    left, right, inside, apart = memory[:60], memory[50:80], memory[10:20], memory[80:]
    spans = sorted(spans_of([apart, inside, right, left]), key=lambda span: span.start)
    assert [(span.num_bytes, len(span.tensors)) for span in spans] == [(320, 3), (80, 1)]
    assert spans[0].offset(right) == 200
    assert spans[0].offset(left) == 0


def test_tensors_on_the_meta_device_are_each_their_own() -> None:
    tensors = [torch.empty(4, device="meta"), torch.empty(4, device="meta")]
    assert [span.num_bytes for span in spans_of(tensors)] == [16, 16]


def laid_out(spans: list[tuple[int, int]], *, in_phase: bool) -> list[tuple[int, int, list[int]]]:
    """Bytes, start and offsets of each piece."""
    pieces = lay_out([Span(start, size, ()) for start, size in spans], in_phase=in_phase)
    return [(num_bytes, start, [offset for _, offset in spans]) for num_bytes, start, spans in pieces]


def test_small_spans_are_one_piece_and_large_ones_each_their_own() -> None:
    sizes = [10, LEAST_PIECE, ALIGNMENT + 1, LEAST_PIECE + 1, 0]
    assert laid_out([(24, size) for size in sizes], in_phase=False) == [
        (4 * ALIGNMENT, 0, [0, ALIGNMENT, 3 * ALIGNMENT]),
        (LEAST_PIECE, 0, [0]),
        (LEAST_PIECE + ALIGNMENT, 0, [0]),
    ]


def test_in_phase_spans_begin_where_in_a_cache_line_they_do() -> None:
    found = [(8, 10), (LINE + 24, LEAST_PIECE), (0, ALIGNMENT), (56, ALIGNMENT), (63, LEAST_PIECE - 1)]
    small = [8, ALIGNMENT, 2 * ALIGNMENT + 56, 4 * ALIGNMENT + 63]
    assert laid_out(found, in_phase=True) == [
        (4 * ALIGNMENT + LEAST_PIECE + ALIGNMENT, 0, small),
        (LEAST_PIECE + ALIGNMENT, 24, [24]),
    ]


def test_what_begins_amid_an_element_has_no_phase() -> None:
    memory = torch.zeros(LINE * 4, dtype=torch.uint8)
    odd = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=3, offset=(-memory.data_ptr()) % LINE + 6)
    even = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=3, offset=(-memory.data_ptr()) % LINE + 28)
    assert [span.phase for span in spans_of([odd, even])] == [0, 28]


def test_what_two_groups_share_is_found_by_memory_not_by_name() -> None:
    tied = torch.nn.Parameter(torch.zeros(8))
    memory = torch.zeros(8)
    one, other = torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[2:])
    alone = torch.nn.Parameter(torch.zeros(8))
    shared = shared_tensors([[tied, one, alone], [tied, other]])
    assert {id(t) for t in shared} == {id(tied), id(one), id(other)}
    assert shared_tensors([[one, other], [alone]]) == []  # Overlapping inside one group is nobody else's business.


class Quantised(torch.Tensor):
    """A tensor that does not say what it is made of."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(2).as_subclass(cls)


@pytest.mark.parametrize(
    ("parameter", "expected"),
    [
        (torch.nn.Parameter(torch.zeros(2).as_subclass(Quantised), requires_grad=False), r"is or holds a .*Quantised"),
        (torch.nn.Parameter(torch.zeros(2, device="meta")), "is on the meta device"),
        (torch.nn.Parameter(torch.zeros(2, 2).to_sparse()), "is torch.sparse_coo"),
    ],
)
def test_what_is_not_plain_memory_is_refused_by_name(parameter: torch.nn.Parameter, expected: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_parameter("odd", parameter)
    with pytest.raises(ModelError, match=rf"transformer\.0\.odd cannot be offloaded: it {expected}"):
        check_movable("transformer", model, torch.device("cpu"))
