"""Compiled blocks: one graph for a class, none for a skipped step, none after two steps, and plain again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compose.matrix import footprint, num_hooks
from pipelines import PIPELINES
from samovar import attach
from samovar.compose.regional import CACHE_VARIABLE, compile_regions, find_regions
from samovar.core.errors import ModelError, SettingError
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
    with attach(pipe, **settings, compile=counter):
        tiny.run(pipe, STEPS)
    assert counter.frame_count == after_two, "plain blocks are not compiled, and attached again nothing is"


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


@torch._dynamo.config.patch(recompile_limit=8)  # sdnq, once imported, makes it 8192.
def test_many_classes_of_hooked_blocks_share_no_limit() -> None:
    """torch gives up after eight graphs of one piece of code: every hooked class has its own."""
    counter = CompileCounterWithBackend("eager")
    for number in range(11):
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


# ------------------------------------------------------------------------------------------------ kept for later


def test_the_folder_that_keeps_compiled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = str(tmp_path / "theirs")
    monkeypatch.setenv(CACHE_VARIABLE, theirs)
    one, other = PIPELINES["flux"].build(0), PIPELINES["flux"].build(0)
    folder = tmp_path / "kept" / "here"
    with attach(one, compile=EXACT, compile_cache=folder):
        assert os.environ[CACHE_VARIABLE] == str(folder)
        assert folder.stat().st_mode & 0o77 == 0, "files in it are run"
        with attach(other, compile=EXACT, compile_cache=str(folder)):
            pass
        assert os.environ[CACHE_VARIABLE] == str(folder)
        before = footprint(other)
        with pytest.raises(SettingError, match=r"keeps its blocks in .*kept/here'. torch has one folder"):
            attach(other, compile=EXACT, compile_cache=tmp_path / "another")
        assert footprint(other) == before
    assert os.environ[CACHE_VARIABLE] == theirs
    with pytest.raises(SettingError, match="keeps compiled blocks, and nothing is compiled"):
        attach(one, compile="graphs", compile_cache=folder)
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot be used as a folder"):
        attach(one, compile=EXACT, compile_cache=tmp_path / "file")
    assert os.environ[CACHE_VARIABLE] == theirs


WORKER = """
import json, sys, torch
from torch._dynamo.utils import counters
from samovar import attach

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        self.attention = torch.nn.MultiheadAttention(8, 1)

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(self.norm(hidden_states)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden_states, timestep):
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states

torch.manual_seed(0)
model = Model().eval()
with torch.no_grad(), attach(model, compile=True, compile_cache=sys.argv[1]):
    output = model(torch.ones(1, 4, 8), torch.ones(1))
found = counters["inductor"]
print(json.dumps([found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], output.sum().item()]))
"""


@pytest.mark.slow
def test_a_later_process_compiles_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path / "kept")]
    done = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    (misses, hits, first), (later_misses, later_hits, later) = (json.loads(one.splitlines()[-1]) for one in done)
    assert (misses, hits) == (1, 0), "the blocks of a class share a graph"
    assert (later_misses, later_hits) == (0, 1)
    assert later == first
