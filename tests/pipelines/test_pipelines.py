"""The tiny pipelines are fit to test with: exact, and no part of them is without effect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from . import PIPELINES, TinyPipeline

STEPS = 4
OTHER = "an owl"

every = pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)


@contextlib.contextmanager
def watched(tiny: TinyPipeline, pipe: Any) -> Iterator[list[tuple[str, int]]]:
    """Which denoiser is called, and for a batch of which size."""
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            seen.append((name, len(args[0] if args else kwargs["hidden_states"])))

        return hook

    models = {name: getattr(pipe, name) for name in tiny.denoisers}
    handles = [model.register_forward_pre_hook(note(name), with_kwargs=True) for name, model in models.items()]
    yield seen
    for handle in handles:
        handle.remove()


@every
def test_weights_seed_steps_and_prompts_matter(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    results = [
        tiny.run(pipe),
        tiny.run(tiny.build(1)),
        tiny.run(pipe, seed=1),
        tiny.run(pipe, steps=STEPS + 1),
        tiny.run(pipe, prompt=OTHER),
        tiny.run(pipe, negative_prompt=OTHER),
    ]
    for index, one in enumerate(results):
        assert not any(torch.equal(one, other) for other in results[:index])


@every
def test_the_branches_are_called_as_declared(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    with watched(tiny, pipe) as seen:
        tiny.run(pipe, steps=STEPS)
    calls, batch = {"separate": (2, 1), "fused": (1, 2), "none": (1, 1)}[tiny.cfg]
    assert [size for _, size in seen] == [batch] * calls * STEPS
    assert tuple(dict.fromkeys(name for name, _ in seen)) == tiny.denoisers


@every
def test_every_block_matters(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    bare = tiny.run(pipe, steps=2)
    for name in tiny.denoisers:
        model = getattr(pipe, name)
        stacks = {path: stack for path, stack in model.named_children() if isinstance(stack, torch.nn.ModuleList)}
        blocks = {f"{path}.{index}": block for path, stack in stacks.items() for index, block in enumerate(stack)}
        assert len(blocks) >= 3
        for path, block in blocks.items():
            weights = {key: value.clone() for key, value in block.state_dict().items()}
            block.load_state_dict({key: torch.zeros_like(value) for key, value in weights.items()})
            assert not torch.equal(tiny.run(pipe, steps=2), bare), f"{name}.{path}"
            block.load_state_dict(weights)
    assert torch.equal(tiny.run(pipe, steps=2), bare)


def test_qwen_cuts_off_its_system_prompt_and_no_more() -> None:
    pipe = PIPELINES["qwen-image"].build(0)
    tokens = pipe.tokenizer(pipe.prompt_template_encode.format("a cat")).input_ids
    rest = pipe.tokenizer.decode(tokens[pipe.prompt_template_encode_start_idx :])
    assert rest == "a cat<|im_end|>\n<|im_start|>assistant\n"
