"""The manual road: a model that is not built of blocks, whose author takes its forward apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from driving import Plain, loop, stepped

from samovar.cache import (
    EXTRACTOR_REGISTRY,
    CacheContext,
    TeaCacheHook,
    apply_teacache_hook,
    make_cache_backend,
    register_extractor,
)
from samovar.cache.extractors import extractor_for
from samovar.core.errors import ModelError, SettingError
from samovar.hooks import call_context

INFINITE: dict[str, Any] = {"rel_l1_thresh": float("inf"), "max_skips": None, "min_steps": 0, "last_steps": 0}
WIDTH = 8


@pytest.fixture(autouse=True)
def _clean_registry() -> Iterator[None]:
    before = dict(EXTRACTOR_REGISTRY)
    yield
    EXTRACTOR_REGISTRY.clear()
    EXTRACTOR_REGISTRY.update(before)


class Mixer(torch.nn.Module):
    """A denoiser that is one expensive layer, and so has nothing that is repeated."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inlet, self.work, self.outlet = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.read = torch.nn.Linear(WIDTH, WIDTH)
            self.clock = torch.nn.Linear(1, WIDTH)

    def enter(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        temb = self.clock(timestep[:, None])[:, None]
        return self.inlet(hidden_states) * (1 + temb), temb

    def mix(self, hidden: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        worked = hidden + torch.tanh(self.work(hidden)) + self.read(text).mean(1, keepdim=True)
        return worked, text + worked.mean(1, keepdim=True)

    def leave(self, hidden: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outlet(hidden + temb)
        return output

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor]:
        hidden, temb = self.enter(hidden_states, timestep)
        hidden, _ = self.mix(hidden, encoder_hidden_states)
        return (self.leave(hidden, temb),)


def with_text(
    module: Mixer, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
) -> CacheContext:
    """Both streams are changed by what is expensive."""
    hidden, temb = module.enter(hidden_states, timestep)
    return CacheContext(
        modulated_input=hidden,
        hidden_states=hidden,
        encoder_hidden_states=encoder_hidden_states,
        temb=temb,
        run_transformer_blocks=lambda: module.mix(hidden, encoder_hidden_states),
        postprocess=lambda worked: (module.leave(worked, temb),),
        extra_states={"length": hidden.shape[1]},
    )


def without_text(module: Mixer, *args: torch.Tensor) -> CacheContext:
    """The hidden states alone."""
    context = with_text(module, *args)
    whole = context.run_transformer_blocks
    context.encoder_hidden_states = None
    context.run_transformer_blocks = lambda: whole()[:1]
    return context


def bare_tensor(module: Mixer, *args: torch.Tensor) -> CacheContext:
    """The hidden states alone, not even in a tuple."""
    context = with_text(module, *args)
    whole: Any = context.run_transformer_blocks
    context.encoder_hidden_states = None
    context.run_transformer_blocks = lambda: whole()[0]
    return context


ROADS = pytest.mark.parametrize("extractor", [with_text, without_text, bare_tensor], ids=lambda e: e.__name__)
TEXT = torch.linspace(-1.0, 1.0, 3 * WIDTH).reshape(1, 3, WIDTH)


def at(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the model is given at a step."""
    start = torch.linspace(-2.0, 1.0, 5 * WIDTH).reshape(1, 5, WIDTH)
    return start.cos() + 0.1 * step * start, torch.full((1,), 1.0 - 0.08 * step), TEXT


@torch.no_grad()
def run(model: torch.nn.Module, *steps: int) -> list[torch.Tensor]:
    with call_context(branch="only"), stepped(model, len(steps) if len(steps) > 2 else 1000) as loop:
        return [loop.call(lambda step=step: model(*at(step))[0]) for step in steps]  # type: ignore[misc]


def hooked(extractor: Callable[..., CacheContext], **settings: Any) -> tuple[Mixer, TeaCacheHook, list[int]]:
    """A model with its extractor, and how often its expensive part was run."""
    register_extractor("Mixer", extractor)
    model, calls = Mixer(), []
    hook = apply_teacache_hook(model, INFINITE | settings)
    model.work.register_forward_pre_hook(lambda *_: calls.append(1))
    return model, hook, calls


def mask(hook: TeaCacheHook) -> str:
    return hook.stats().branches["only"].mask


def test_without_an_extractor_the_model_is_refused_with_the_remedy_and_left_alone() -> None:
    model = Mixer()
    before = [(type(module), set(vars(module))) for module in model.modules()]
    with pytest.raises(ModelError, match=r"Mixer has no stack of blocks.*register_extractor"):
        apply_teacache_hook(model)
    with pytest.raises(ModelError):
        make_cache_backend("tea_cache").enable(model)  # type: ignore[union-attr]
    assert [(type(module), set(vars(module))) for module in model.modules()] == before


@ROADS
@pytest.mark.parametrize("threshold", [0, 1e-12])
def test_a_run_that_skips_nothing_gives_the_bits_of_the_bare_model(
    extractor: Callable[..., CacheContext], threshold: float
) -> None:
    model, hook, _ = hooked(extractor, rel_l1_thresh=threshold)
    assert all(map(torch.equal, run(model, *range(6)), run(Mixer(), *range(6))))
    assert mask(hook) == "######"


def test_the_signal_decides_by_what_the_extractor_says_it_is() -> None:
    def still(module: Mixer, *args: torch.Tensor) -> CacheContext:
        context = with_text(module, *args)
        context.modulated_input = torch.ones(2)
        return context

    model, hook, _ = hooked(still, rel_l1_thresh=1e-6)
    run(model, 0, 1, 2)
    assert mask(hook) == "#.."
    hook.detach()
    model, hook, _ = hooked(with_text, rel_l1_thresh=1e-6)
    run(model, 0, 1, 2)
    assert mask(hook) == "###"
    distances = [record.distance for record in hook.stats().branches["only"].steps]
    with torch.no_grad():
        (before, _), (after, _) = (model.enter(*at(step)[:2]) for step in (0, 1))
    assert distances[0] is None
    assert distances[1] == pytest.approx(float((after - before).abs().sum() / before.abs().sum()), rel=1e-5)
    assert "with_text" in hook.stats().signal


def test_a_model_that_works_in_place_is_not_silently_wrong() -> None:
    """The hidden states that the extractor named are overwritten by the expensive part."""

    def in_place(module: Mixer, *args: torch.Tensor) -> CacheContext:
        context = with_text(module, *args)

        def work() -> tuple[torch.Tensor, ...]:
            worked, text = module.mix(context.hidden_states, TEXT)
            return context.hidden_states.copy_(worked), text

        context.run_transformer_blocks = work
        return context

    model, _, _ = hooked(in_place)
    computed, again = run(model, 0, 0)
    assert torch.equal(computed, run(Mixer(), 0)[0])
    assert torch.allclose(again, computed, atol=1e-5)


# ------------------------------------------------------------------------------------------------ which extractor


@pytest.mark.parametrize(
    ("name", "extractor"), [(Mixer, with_text), (None, with_text), ("Mixer", None), ("Mixer", "with_text"), (1, 2)]
)
def test_nonsense_is_refused(name: Any, extractor: Any) -> None:
    before = dict(EXTRACTOR_REGISTRY)
    with pytest.raises(SettingError, match="a class name and a function") as refusal:
        register_extractor(name, extractor)
    assert repr(name) in str(refusal.value)
    assert before == EXTRACTOR_REGISTRY


def test_the_nearest_class_counts_and_a_later_extractor_replaces_an_earlier_one() -> None:
    class Finer(Mixer):
        pass

    assert extractor_for(Finer()) is None
    register_extractor("Mixer", with_text)
    assert extractor_for(Mixer()) is extractor_for(Finer()) is with_text
    register_extractor("Finer", without_text)
    assert extractor_for(Finer()) is without_text
    assert extractor_for(Mixer()) is with_text
    register_extractor("Mixer", bare_tensor)
    assert extractor_for(Mixer()) is bare_tensor
    assert extractor_for(torch.nn.Linear(1, 1)) is None


# ------------------------------------------------------------------------------------------------ the signal alone


def modulated(module: Plain, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
    (block, *_) = module.blocks
    found: torch.Tensor = block.norm(hidden_states) * (1 + temb)  # type: ignore[operator]
    return found


def still(module: Plain, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
    return torch.ones(2)


def test_an_extractor_of_the_modulated_input_leaves_the_blocks_to_the_cache() -> None:
    settings = {"rel_l1_thresh": 0.3, "max_skips": None, "min_steps": 0, "last_steps": 0}
    found = {}
    for name, extractor in {"found": None, "extracted": modulated, "still": still}.items():
        model = Plain()
        if extractor is not None:
            register_extractor("Plain", extractor)
        hook = apply_teacache_hook(model, settings)
        found[name] = loop(model), hook.stats().branches["only"].mask
        assert hook.extractor_fn is extractor
        assert (f"the modulated input from {name}" in hook.stats().signal) is (name == "still")
        hook.detach()
    assert found["extracted"][1] == found["found"][1], "it is the one that is found without it"
    assert "." in found["found"][1]
    assert all(map(torch.equal, found["extracted"][0], found["found"][0]))
    assert found["still"][1] == "#" + 11 * "."
