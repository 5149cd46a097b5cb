"""A trial on a model's shadow gives what the model gives, and nobody notices."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from driving import COND, Block, Plain, at, case, counted, state_of

import zoo
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from samovar.trace.shadow import Shadow, TrialFailed, shadow_of, trial


def bare(model: torch.nn.Module, *given: Any) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(*(given or (*at(0), COND)))
    return output


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


NAMES = [
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
    "HiDreamImageTransformer2DModel",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_shadow_gives_the_bits_of_its_model(name: str) -> None:
    model = case(name).build()
    exact, before = case(name).run(model), state_of(model)
    shadow = Shadow(model, {})
    assert zoo.equal(shadow.run((), case(name).inputs(0) | {"return_dict": False}), exact)
    assert state_of(model) == before


def test_a_shadow_has_nothing_that_we_put_on_the_model() -> None:
    model = Plain()
    vars(model)["_samovar_attached"] = [model, torch.zeros(4)]
    assert not [key for key in vars(shadow_of(model)) if key.startswith("_samovar_")]


def test_its_weights_are_those_of_the_model_and_no_copies() -> None:
    model = Plain()
    shadow = shadow_of(model)
    assert all(one is other for one, other in zip(shadow.parameters(), model.parameters(), strict=True))
    assert not set(shadow.modules()) & set(model.modules())
    pairs = zip(shadow.modules(), model.modules(), strict=True)
    assert all(isinstance(one, type(other)) and type(one).__name__ == type(other).__name__ for one, other in pairs)
    with torch.no_grad():
        model.unembed.weight.mul_(2)
    assert torch.equal(bare(shadow), bare(model))


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
    for module in (model, *model.blocks):
        HookRegistry.get_or_create(module).register_hook("loud", Loud())
    assert torch.equal(Shadow(model, {}).run((*at(0), COND), {}), exact)
    assert calls == []


class Remembering(Plain):
    """Counts its calls, keeps a list and a table of them, and fills a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen, self.by_time = 0, [], {"times": [0.0]}
        self.register_buffer("last", torch.zeros(4))
        self.spare = torch.zeros(4)

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        self.count += 1
        self.seen.append(1)
        self.by_time["times"].append(float(timestep[0]))
        self.last.copy_(encoder_hidden_states[0])
        self.spare.add_(1)
        return super().forward(hidden_states, timestep, encoder_hidden_states)


def test_it_counts_in_no_counter_of_the_models() -> None:
    model = Remembering()
    shadow = Shadow(model, {})
    for _ in range(2):
        shadow.run((*at(0), COND), {})
    assert (model.count, model.seen, model.by_time) == (0, [], {"times": [0.0]})
    assert not model.last.any()
    assert not model.spare.any()


class Drawing(Plain):
    """Draws random numbers as it goes."""

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        return super().embed(time, conditioning) + torch.randn(1, 1, self.width)


def test_it_draws_no_random_numbers_of_the_users() -> None:
    model = Drawing()
    shadow = Shadow(model, {})
    before = torch.get_rng_state()
    shadow.run((*at(0), COND), {})
    assert torch.equal(torch.get_rng_state(), before)


class Writing(Plain):
    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        hidden_states.mul_(0.5)
        encoder_hidden_states.zero_()
        return super().forward(hidden_states, timestep, encoder_hidden_states)


def test_it_writes_into_no_tensor_that_the_user_holds() -> None:
    (sample, time), text = at(0), COND.clone()
    Shadow(Writing(), {}).run((sample, time), {"encoder_hidden_states": text})
    assert torch.equal(sample, at(0)[0])
    assert torch.equal(text, COND)


def test_it_records_no_gradients() -> None:
    model, sample = Plain(), at(0)[0].requires_grad_()
    assert not Shadow(model, {}).run((sample, at(0)[1], COND), {}).requires_grad
    assert sample.grad is None


def test_modules_that_should_not_run_are_answered() -> None:
    model, asked = Plain(), []

    def answer(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        asked.append(module)
        return torch.ones(1, 5, 8) if module is model.blocks[2] else NOT_BYPASSED

    with counted(model.blocks) as calls:
        output = Shadow(model, dict.fromkeys(model.blocks, answer)).run((*at(0), COND), {})
    assert (asked, calls) == (list(model.blocks), [])
    with torch.no_grad():
        assert torch.equal(output, model.unembed(torch.ones(1, 5, 8)))


def test_what_the_model_raises_is_told_apart_from_what_we_raise() -> None:
    with pytest.raises(TrialFailed, match="RuntimeError"):
        Shadow(Plain(), {}).run((torch.ones(1, 5, 99), at(0)[1], COND), {})
    with pytest.raises(KeyboardInterrupt), trial(()):
        raise KeyboardInterrupt


class Selfish(Plain):
    """Its blocks know their model and themselves, and hold methods of theirs."""

    class Block(Block):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.itself, self.way = [self], self.attend

        def attend(self, x: torch.Tensor) -> torch.Tensor:
            assert self.itself[0] is self
            attended: torch.Tensor = self.attn(x)
            return attended

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            assert self.way.__self__ is self  # type: ignore[attr-defined]
            return x + self.way(self.norm(x) * (1 + temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


def test_references_to_modules_are_references_to_their_shadows() -> None:
    model = Selfish()
    assert torch.equal(Shadow(model, {}).run((*at(0), COND), {}), bare(model))


def test_a_forward_that_somebody_put_on_a_module_is_the_shadows_too() -> None:
    model = Plain()

    def forward(self: Any, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return x * 3 + self.ff(x)

    model.blocks[1].forward = types.MethodType(forward, model.blocks[1])
    assert torch.equal(Shadow(model, {}).run((*at(0), COND), {}), bare(model))
    assert not torch.equal(bare(model), bare(Plain()))


def test_a_module_that_is_held_twice_has_one_shadow() -> None:
    model = Plain()
    model.blocks[2] = model.blocks[0]
    shadow = shadow_of(model)
    assert shadow.blocks[2] is shadow.blocks[0]


def test_weights_that_accelerate_keeps_elsewhere_are_brought() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Plain()
    exact = bare(model)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(Shadow(offloaded, {}).run((*at(0), COND), {}), exact)
    assert all(parameter.is_meta for parameter in offloaded.parameters())


def test_a_compiled_model_is_tried_uncompiled() -> None:
    model = Plain(num_blocks=2)
    exact = bare(model)
    model.compile(backend="eager")
    assert torch.equal(Shadow(model, {}).run((*at(0), COND), {}), exact)
    torch.compiler.reset()


class Splitting(ModelHook):
    order = HookOrder.SHARD

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output * 2


def test_hooks_that_split_the_work_over_ranks_are_part_of_the_forward() -> None:
    model = Plain()
    HookRegistry.get_or_create(model.blocks[0]).register_hook("split", Splitting())
    assert torch.equal(Shadow(model, {}).run((*at(0), COND), {}), bare(model))


def test_the_shadow_of_an_8_bit_layer_leaves_its_weight_alone() -> None:
    layers = pytest.importorskip("bitsandbytes").nn
    layer = layers.Linear8bitLt(32, 32, has_fp16_weights=False, threshold=6.0).to("cpu").eval()
    given = torch.randn(2, 32, dtype=torch.float16)
    expected = bare(copy.deepcopy(layer), given)
    address, shadow = layer.weight.data_ptr(), shadow_of(layer)
    assert torch.equal(bare(shadow, given), expected)
    assert torch.equal(bare(layer, given), expected)
    assert torch.equal(bare(shadow, given), expected)
    assert {layer.weight.data_ptr(), layer.state.CB.data_ptr(), shadow.state.CB.data_ptr()} == {address}
