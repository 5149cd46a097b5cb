"""A trial on a model's twin gives what the model gives, and nobody notices."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from driving import COND, Block, Plain, at, case, counted, state_of

import zoo
from samovar.hooks import HookOrder, HookRegistry, ModelHook
from samovar.trace.twin import TrialFailed, run_trial, trial, twin_of


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def bare(model: torch.nn.Module, *given: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(*(given or (*at(0), COND)))
    return output


def tried(model: torch.nn.Module, **how: Any) -> torch.Tensor:
    output: torch.Tensor = run_trial(twin_of(model, **how), (*at(0), COND), {})
    return output


@pytest.mark.parametrize("name", ["ZImageTransformer2DModel", "HiDreamImageTransformer2DModel"])
def test_a_twin_gives_the_bits_of_its_model(name: str) -> None:
    model = case(name).build()
    exact, before = case(name).run(model), state_of(model)
    assert zoo.equal(run_trial(twin_of(model), (), case(name).inputs(0) | {"return_dict": False}), exact)
    assert state_of(model) == before


class Loud(ModelHook):
    order = HookOrder.OUTERMOST

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nobody's hooks are called in a trial")


def test_it_fires_no_hook_of_anybodys() -> None:
    model, calls = Plain(), []
    exact = bare(model)
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    for module in (model, *model.blocks):
        HookRegistry.get_or_create(module).register_hook("loud", Loud())
    assert torch.equal(tried(model), exact)
    everywhere.remove()
    assert calls == []


class Remembering(Plain):
    """Leaves traces wherever a model can: counters, lists, tables, buffers, arrays, random numbers and arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen, self.by_time = 0, [], {"times": [0.0]}
        self.register_buffer("last", torch.zeros(4))
        self.spare, self.array, self.notes = torch.zeros(4), np.zeros(2), types.SimpleNamespace(count=0)
        self.generator = torch.Generator()

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        self.count += 1
        self.seen.append(1)
        self.by_time["times"].append(float(timestep[0]))
        self.last.copy_(encoder_hidden_states[0])
        self.spare.add_(1)
        self.array += 1
        self.notes.count += 1
        torch.randn(1, generator=self.generator)
        np.random.rand()
        noise = torch.randn(1, 1, self.width)
        return super().forward(hidden_states.mul_(0.5), timestep, encoder_hidden_states.zero_()) + noise.mean()


def test_a_trial_leaves_no_trace() -> None:
    model, (sample, time), text = Remembering(), at(0), COND.clone()
    torch_state, numpy_state, own_state = torch.get_rng_state(), np.random.get_state()[1], model.generator.get_state()
    twin = twin_of(model)
    for _ in range(2):
        assert not run_trial(twin, (sample.requires_grad_(), time), {"encoder_hidden_states": text}).requires_grad
    assert (model.count, model.seen, model.by_time, model.notes.count) == (0, [], {"times": [0.0]}, 0)
    assert not torch.cat([model.last, model.spare, torch.from_numpy(model.array)]).any()
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    assert torch.equal(model.generator.get_state(), own_state)
    assert torch.equal(sample, at(0)[0])
    assert torch.equal(text, COND)


def test_what_the_model_raises_is_told_apart_from_what_we_raise() -> None:
    with pytest.raises(TrialFailed, match="RuntimeError: mat1"), trial(()):
        run_trial(twin_of(Plain()), (torch.ones(1, 5, 99), at(0)[1], COND), {})
    with pytest.raises(KeyboardInterrupt), trial(()):
        raise KeyboardInterrupt
    model = Plain()
    with pytest.warns(DeprecationWarning, match="script"):
        model.blocks[2] = torch.jit.script(model.blocks[2].ff)
    with pytest.raises(TrialFailed, match="a Linear is scripted"):
        twin_of(model)


class Selfish(Plain):
    """Its blocks know their model and themselves, and hold methods of theirs in every way."""

    class Block(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.itself, self.way = [self], self.attend
            self.partly = functools.partial(self.attend, again=False)
            self.closed = lambda x: self.way(x)

        def attend(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            assert self.itself[0] is self
            attended: torch.Tensor = self.attn(x)
            return attended + self.partly(x) if again else attended

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            assert self.way.__self__ is self.partly.func.__self__ is self  # type: ignore[attr-defined]
            return x + self.closed(self.norm(x) * (1 + temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


def test_references_to_modules_are_references_to_their_twins() -> None:
    model = Selfish()
    with counted(model.modules()) as calls:
        output = tried(model)
    assert calls == []
    assert torch.equal(output, bare(model))


def test_a_forward_that_somebody_put_on_a_module_is_the_twins_too() -> None:
    model = Plain()

    def forward(self: Any, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return x * 3 + self.ff(x)

    model.blocks[1].forward = types.MethodType(forward, model.blocks[1])
    assert torch.equal(tried(model), bare(model))
    assert not torch.equal(bare(model), bare(Plain()))


def test_weights_that_accelerate_keeps_elsewhere_are_brought() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Plain()
    exact = bare(model)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(tried(offloaded), exact)
    assert all(parameter.is_meta for parameter in offloaded.parameters())


def test_a_compiled_model_is_tried_uncompiled() -> None:
    model = Plain(num_blocks=2)
    exact = bare(model)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.compile(backend="eager")
    assert torch.equal(tried(model), exact)
    torch.compiler.reset()


def test_the_twin_of_an_8_bit_layer_leaves_its_weight_alone() -> None:
    layers = pytest.importorskip("bitsandbytes").nn
    layer = layers.Linear8bitLt(32, 32, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    given = torch.randn(2, 32, dtype=torch.float16)
    expected = bare(copy.deepcopy(layer), given)
    address, twin = layer.weight.data_ptr(), twin_of(layer)
    for each in (twin, layer, twin):
        assert torch.equal(bare(each, given), expected)
    assert {layer.weight.data_ptr(), layer.state.CB.data_ptr(), twin.state.CB.data_ptr()} == {address}
