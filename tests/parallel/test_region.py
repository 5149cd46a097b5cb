"""What a rehearsal shows, and forwards that would be wrong."""

from __future__ import annotations

from typing import Any

import torch

from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    ShardingError,
    apply_sequence_parallel,
)

from . import toys
from .conftest import OnRanks

TWO = SequenceParallelConfig(ulysses_degree=2)
PLAN = {"": {"hidden_states": SequenceParallelInput(1, 3)}, "proj_out": SequenceParallelOutput(1, 3)}


@torch.no_grad()
def held_function() -> tuple[list[bool], float]:
    """A model that does not hold torch's function itself, and one that does."""
    found, bare = [], toys.build()(toys.tokens(12))
    apart = 0.0
    for attention in (toys.Attention, toys.DirectAttention):
        model = toys.build(attention)
        sharding = apply_sequence_parallel(model, TWO, PLAN)
        apart = max(apart, *(float((model(toys.tokens(12)) - bare).abs().max()) for _ in range(2)))
        found += [trace.needs_mode for trace in sharding._traces.values()]
    return found, apart


def test_a_model_that_holds_torch_s_function_is_served_too(on_ranks: OnRanks) -> None:
    for needs_mode, apart in on_ranks(2, held_function):
        assert needs_mode == [False, True], "only the one that needs it pays for it"
        assert apart <= 1e-5


class Fickle(toys.Attention):
    """Uses torch's attention until `is_handmade` is set."""

    is_handmade = False

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        attend = toys.HandmadeAttention.attend if Fickle.is_handmade else toys.Attention.attend
        return attend(self, *args, **kwargs)  # type: ignore[arg-type]


class Partial(toys.Attention):
    """Leaves out the last key."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> torch.Tensor:  # type: ignore[override]
        return super().attend(query, key[..., :-1, :], value[..., :-1, :], **others)


@torch.no_grad()
def refused() -> list[str]:
    """Attention by hand, no tokens split, attention by hand after the rehearsal, and tokens that are left out."""
    fickle = toys.build(Fickle)
    apply_sequence_parallel(fickle, TWO, PLAN)
    fickle(toys.tokens(12))
    Fickle.is_handmade = True
    handmade, unsplit = toys.build(toys.HandmadeAttention), toys.build()
    apply_sequence_parallel(handmade, TWO, PLAN)
    apply_sequence_parallel(unsplit, TWO, {"embed": {0: SequenceParallelInput(1, split_output=True)}})
    partial = toys.build(Partial)
    apply_sequence_parallel(partial, TWO, PLAN)
    found = []
    for model in (handmade, unsplit, fickle, partial):
        try:
            model(toys.tokens(12))
        except ShardingError as error:
            found.append(str(error))
    Fickle.is_handmade = False
    return found


def test_a_forward_that_would_be_wrong_raises(on_ranks: OnRanks) -> None:
    for *alone, some in on_ranks(2, refused):
        assert len(alone) == 3
        assert all("forward of Transformer runs no attention on several ranks" in message for message in alone)
        assert "Keys of attention 0 of 'blocks.0' holds only some of the" in some


@torch.no_grad()
def many_shapes() -> tuple[float, int]:
    model, bare = toys.build(), toys.build()
    sharding = apply_sequence_parallel(model, TWO, PLAN)
    worst = 0.0
    for length, batch in ((12, 1), (9, 1), (12, 3), (12, 1), (9, 1)):
        inputs = toys.tokens(length, batch)
        worst = max(worst, float((model(inputs) - bare(inputs)).abs().max()))
    return worst, len(sharding._traces)


def test_every_new_shape_is_rehearsed_once(on_ranks: OnRanks) -> None:
    for worst, rehearsed in on_ranks(2, many_shapes):
        assert worst <= 1e-5
        assert rehearsed == 3
