"""What a trial finds in a block: the tokens, and the tables that have an entry for each."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.core.errors import ModelError
from samovar.parallel import SequenceParallelInput, SequenceParallelOutput, SequenceParallelPartialInput
from samovar.parallel.derive import split_stack

from . import toys


def split(name: str, stack: str, size: int = 2) -> Any:
    model, anatomy, watched = toys.watched_run(name)
    return split_stack(model, {each.path: each for each in anatomy.stacks}[stack], watched, size)


def test_tokens_and_tables() -> None:
    wan = split("WanTransformer3DModel", "blocks")
    assert (wan.stream, wan.dim, wan.length) == ("hidden_states", 1, 60)
    assert wan.outputs == SequenceParallelOutput(1)
    assert wan.tables == {"rotary_emb": (SequenceParallelInput(1),) * 2}


def test_tables_of_text_and_image() -> None:
    for name in ("FluxTransformer2DModel", "FluxTransformer2DModel-equal-lengths"):
        flux = split(name, "transformer_blocks")
        both = SequenceParallelPartialInput(0, "encoder_hidden_states")
        assert (flux.stream, flux.outputs) == ("hidden_states", [None, SequenceParallelOutput(1)])
        assert flux.tables == {"image_rotary_emb": (both, both)}


def test_the_sequence_need_not_be_the_second_dimension() -> None:
    assert split("ErnieImageTransformer2DModel", "layers").dim == 0


def test_blocks_that_mix_tokens_otherwise_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'transformer_blocks' cannot be split.*SanaTransformerBlock"):
        split("SanaTransformer2DModel", "transformer_blocks")
    with pytest.raises(ModelError, match="a dimension of at least 99"):
        split("WanTransformer3DModel", "blocks", size=99)
