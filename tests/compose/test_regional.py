"""Compiled blocks: one graph for a class, none for a skipped step, none after two steps, and plain again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compose.matrix import footprint, num_hooks
from pipelines import PIPELINES
from samovar import attach
from samovar.compose.regional import compile_regions, find_regions
from samovar.errors import ModelError, SettingError
from samovar.hooks import HookOrder, HookRegistry, ModelHook

# A compiler that keeps the bits of plain torch: what is tested is what is compiled and when, not how.
EXACT = "aot_eager"
STEPS, MASK = 6, "#.##.#"
SCHEDULE = {"schedule": MASK}


@pytest.fixture(autouse=True)
def _no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Marks(ModelHook):
    """How many graphs there are at each call of the denoiser."""

    order = HookOrder.OUTERMOST

    def __init__(self, counter: Any) -> None:
        self._counter, self.graphs = counter, [0]

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self.graphs.append(self._counter.frame_count)
        return output


SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {},
    "cache": {"cache": {"backend": "tea_cache", "rel_l1_thresh": 0.3, "min_steps": 1}},
    "schedule and layerwise": {
        "cache": {"backend": "tea_cache", **SCHEDULE},
        "offload": {"mode": "layerwise", "device": "cpu"},
    },
}


@pytest.mark.parametrize(
    ("name", "together"), [("flux", "schedule and layerwise"), ("qwen-image", "alone"), ("sd3", "cache")]
)
def test_nothing_is_compiled_after_two_steps(name: str, together: str) -> None:
    tiny, settings = PIPELINES[name], SETTINGS[together]
    pipe = tiny.build(0)
    bare = tiny.run(pipe, STEPS)
    before = footprint(pipe)
    with attach(pipe, **settings):
        expected = tiny.run(pipe, STEPS)
    counter = CompileCounterWithBackend(EXACT)
    attached = attach(pipe, **settings, compile=counter)
    marks = Marks(counter)
    HookRegistry.get_or_create(pipe.transformer).register_hook("marks", marks)
    assert torch.equal(tiny.run(pipe, STEPS), expected)
    branches = 2 if tiny.cfg == "separate" else 1
    after_two = marks.graphs[2 * branches]
    # One for each class of blocks, and one more where branches have texts of different lengths, or a block is unlike.
    assert 1 <= after_two <= 4
    assert marks.graphs[-1] == after_two
    assert torch.equal(tiny.run(pipe, STEPS), expected)
    assert marks.graphs[-1] == after_two, "nor in another run"
    HookRegistry.get_or_create(pipe.transformer).remove_hook("marks")
    attached.detach()
    assert footprint(pipe) == before
    assert num_hooks(pipe) == 0
    assert torch.equal(tiny.run(pipe, STEPS), bare)
    assert counter.frame_count == after_two, "plain blocks are not compiled"


def test_a_skipped_step_runs_no_graph() -> None:
    ran = 0

    def compiler(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal ran
            ran += 1
            return graph.forward(*args)

        return call

    tiny = PIPELINES["sd3"]
    pipe = tiny.build(0)
    runs = {}
    for mask in ("######", MASK):
        with attach(pipe, cache={"backend": "tea_cache", "schedule": mask}, compile=compiler):
            tiny.run(pipe, STEPS)
            before = ran
            tiny.run(pipe, STEPS)
            runs[mask] = ran - before
    num_blocks = len(pipe.transformer.transformer_blocks)
    assert runs["######"] == STEPS * num_blocks
    assert runs["######"] - runs[MASK] == MASK.count(".") * num_blocks


def test_attached_again_nothing_is_compiled_again() -> None:
    tiny = PIPELINES["qwen-image"]
    pipe = tiny.build(0)
    counter = CompileCounterWithBackend(EXACT)
    counts = []
    for _ in range(3):
        with attach(pipe, compile=counter):
            tiny.run(pipe, 2)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2] > 0


def test_many_classes_of_hooked_blocks_share_no_limit() -> None:
    """torch gives up after eight graphs of one piece of code: every hooked class has its own."""
    counter = CompileCounterWithBackend("eager")
    for number in range(torch._dynamo.config.recompile_limit + 3):
        made = type(f"Block{number}", (torch.nn.Linear,), {})
        block = made(4, 4)
        HookRegistry.get_or_create(block).register_hook("nothing", ModelHook())
        block.compile(backend=counter)
        block(torch.ones(2, 4))
    assert counter.frame_count == number + 1


def test_blocks_that_are_compiled_or_not_there_are_refused() -> None:
    pipe = PIPELINES["flux"].build(0)
    plain = find_regions({"transformer": pipe.transformer})
    assert [path.rpartition(".")[0] for path in plain] == [
        *["transformer.transformer_blocks"] * 2, *["transformer.single_transformer_blocks"] * 3
    ]  # fmt: skip
    undo = compile_regions(plain, EXACT)
    assert all("_compiled_call_impl" in vars(block) for block in plain.values())
    with pytest.raises(SettingError, match=r"transformer.transformer_blocks.0 is compiled already. Leave out compile"):
        attach(pipe, compile=True)
    undo()
    assert not any("_compiled_call_impl" in vars(block) for block in plain.values())
    with pytest.raises(ModelError, match="'model', a Linear, has no stack of blocks to compile"):
        find_regions({"model": torch.nn.Linear(1, 1)})


@pytest.mark.slow
def test_torchs_own_compiler_with_everything_on() -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    settings: dict[str, Any] = SETTINGS["schedule and layerwise"]
    with attach(pipe, **settings):
        expected = tiny.run(pipe, STEPS)
    with attach(pipe, **settings, compile=True):
        torch.testing.assert_close(tiny.run(pipe, STEPS), expected, rtol=0, atol=1e-4)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs > 0
        tiny.run(pipe, STEPS)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
