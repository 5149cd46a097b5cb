"""What a rehearsal shows, and forwards that would be wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    ShardingError,
    apply_sequence_parallel,
    enable_sequence_parallel_for_model,
)
from samovar.parallel.attention import sdpa

from . import toys
from .conftest import OnRanks

TWO = SequenceParallelConfig(ulysses_degree=2)
PLAN = {"": {"hidden_states": SequenceParallelInput(1, 3)}, "proj_out": SequenceParallelOutput(1, 3)}


@torch.no_grad()
def held_function() -> tuple[bool, bool, float]:
    """A model that holds torch's function itself, and one that does not."""
    plain, direct = toys.build(), toys.build(toys.DirectAttention)
    bare = plain(toys.tokens(12))
    shardings = [apply_sequence_parallel(model, TWO, PLAN) for model in (plain, direct)]
    outputs = [model(toys.tokens(12)) for model in (plain, direct) for _ in range(2)]
    modes = [next(iter(sharding._traces.values())).needs_mode for sharding in shardings]
    return modes[0], modes[1], max(float((output - bare).abs().max()) for output in outputs)


def test_a_model_that_holds_torch_s_function_is_served_too(on_ranks: OnRanks) -> None:
    for plain, direct, apart in on_ranks(2, held_function):
        assert (plain, direct) == (False, True), "only the one that needs it pays for it"
        assert apart <= 1e-5


@torch.no_grad()
def handmade() -> list[str]:
    found = []
    for attention in (toys.HandmadeAttention, toys.Attention):
        model = toys.build(attention)
        plan = (
            PLAN if attention is toys.HandmadeAttention else {"embed": {0: SequenceParallelInput(1, split_output=True)}}
        )
        apply_sequence_parallel(model, TWO, plan)
        try:
            model(toys.tokens(12))
        except ShardingError as error:
            found.append(str(error))
    return found


def test_a_forward_that_runs_no_attention_in_parallel_raises(on_ranks: OnRanks) -> None:
    for messages in on_ranks(2, handmade):
        assert len(messages) == 2
        assert all("forward of Transformer runs no attention on several ranks" in message for message in messages)


class _Fickle(toys.Attention):
    """Uses torch's attention until `is_handmade` is set."""

    is_handmade = False

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        attend = toys.HandmadeAttention.attend if _Fickle.is_handmade else toys.Attention.attend
        return attend(self, *args, **kwargs)  # type: ignore[arg-type]


@torch.no_grad()
def fickle() -> str:
    """A forward that differs from its rehearsal."""
    model = toys.build(_Fickle)
    apply_sequence_parallel(model, TWO, PLAN)
    model(toys.tokens(12))
    _Fickle.is_handmade = True
    try:
        model(toys.tokens(12))
    except ShardingError as error:
        return str(error)
    finally:
        _Fickle.is_handmade = False
    return ""


def test_every_forward_is_checked_and_not_its_rehearsal_alone(on_ranks: OnRanks) -> None:
    for message in on_ranks(2, fickle):
        assert "runs no attention on several ranks" in message


class Skip(ModelHook):
    """A cache that answers for every block but the first."""

    order = HookOrder.CACHE

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return args[0] if self.is_on else NOT_BYPASSED

    is_on = False


@torch.no_grad()
def skipped() -> tuple[float, float, list[tuple[int, ...]]]:
    """Blocks that a cache answers for see parts of the sequence as well, and need no attention."""
    model = toys.build()
    expected = model.proj_out(toys.tokens(13))
    enable_sequence_parallel_for_model(model, TWO)
    computed = toys.build()(toys.tokens(13))
    shapes: list[tuple[int, ...]] = []

    class Noted(Skip):
        def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                shapes.append(tuple(args[0].shape))
            return super().bypass(module, *args, **kwargs)

    hook = Noted()
    for block in model.blocks:
        HookRegistry.get_or_create(block).register_hook("cache", hook)
    first = float((model(toys.tokens(13)) - computed).abs().max())
    hook.is_on = True
    return first, float((model(toys.tokens(13)) - expected).abs().max()), shapes


def test_skipped_blocks_see_parts_too(on_ranks: OnRanks) -> None:
    for rank, (first, then, shapes) in enumerate(on_ranks(2, skipped)):
        assert first <= 1e-5
        assert then <= 1e-5
        assert shapes == [(1, 7 - rank, toys.WIDTH)] * 3


@torch.no_grad()
def other_models() -> bool:
    """Another model that runs inside a sharded one's forward time, and after it, is not touched."""
    sharded, other = toys.build(), toys.build()
    bare = other(toys.tokens(9))
    apply_sequence_parallel(sharded, TWO, PLAN)
    sharded(toys.tokens(12))
    assert F.scaled_dot_product_attention is sdpa
    return torch.equal(other(toys.tokens(9)), bare)


def test_other_models_are_untouched(on_ranks: OnRanks) -> None:
    assert on_ranks(2, other_models) == [True, True]


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
