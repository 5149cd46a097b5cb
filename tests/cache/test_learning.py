"""What is learned of a model when a form of inputs is seen for the first time, and how models are found out that
cannot be skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from driving import (
    COND,
    INFINITE,
    UNCOND,
    UNGUARDED,
    Block,
    Leaking,
    Plain,
    at,
    case,
    counted,
    differing,
    loop,
    stepped,
)

import zoo
from samovar.cache import TeaCacheHook, apply_teacache_hook
from samovar.hooks import call_context

Run = Callable[[torch.nn.Module], list[torch.Tensor]]
SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}


def mask(hook: TeaCacheHook) -> str:
    return hook.stats().branches["only"].mask


def test_learning_calls_no_part_of_the_model() -> None:
    name = "FluxTransformer2DModel"
    bare, model = case(name).build(), case(name).build()
    hook = apply_teacache_hook(model, SKIPPING)
    counts = []
    for built in (bare, model):
        with counted(built.modules()) as calls, call_context(branch="only"):
            case(name).run(built)
        counts.append(len(calls))
    assert counts[0] == counts[1]
    assert hook.stats().problem is None


def test_a_model_that_can_be_skipped_is_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from samovar.cache import blocks as under_test

    made: list[Any] = []

    class Counted(under_test.Watcher):
        def __init__(self, *args: Any) -> None:
            made.append(args)
            super().__init__(*args)

    monkeypatch.setattr(under_test, "Watcher", Counted)
    model = Plain()
    hook = apply_teacache_hook(model, SKIPPING)
    for _ in range(3):
        loop(model, steps=6)
        loop(model, steps=6, conditioning=UNCOND, branch="other")
    assert len(made) == 1
    assert hook.stats().problem is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_learned_as_well(dtype: torch.dtype) -> None:
    model = Plain().to(dtype)
    hook = apply_teacache_hook(model, SKIPPING)
    conditioning = COND.to(dtype)
    with torch.no_grad(), call_context(branch="only"), stepped(model) as run:
        given = at(0)[0].to(dtype), at(0)[1].to(dtype), conditioning
        outputs = [run.call(lambda: model(*given)) for _ in range(2)]
    assert (hook.stats().problem, hook.stats().branches["only"].mask) == (None, "#.")
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


# ------------------------------------------------------------------------------------------------ models in the way


class Counting(Plain):
    """What its blocks do depends on how often they were called."""

    class Block(Block):
        calls = 0

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x, temb) * self.calls

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


class Tapped(Plain):
    """A value in the middle of the stack is used behind it."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x, temb)
        middle = self.blocks[1](x, temb)
        return self.blocks[2](middle, temb) + middle


class InPlace(Plain):
    """Its blocks write into what they are given."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x.copy_(super().forward(x, temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


SETTINGS = {
    "residual": SKIPPING,
    "schedule": {"schedule": "#.#.#.#.#.#."},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("make", [Leaking, Tapped])
def test_a_model_that_cannot_be_skipped_stays_exact_and_says_why(
    make: type[Plain], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    exact = loop(make())
    model = make()
    hook = apply_teacache_hook(model, settings)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert differing(loop(model), exact) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once"
    assert make.__name__ in caplog.text
    stats = hook.stats()
    assert stats.problem is not None
    assert stats.problem in str(stats)
    assert "differs" in stats.problem
    assert mask(hook) == "#" * 12


def test_by_a_saved_schedule_outputs_are_forecast_even_if_blocks_cannot_be_skipped() -> None:
    """The blocks have no say in it: outputs that were computed are carried on."""
    model = Tapped()
    hook = apply_teacache_hook(model, {"schedule": "##..........", "forecast_of": "output"})
    outputs, exact = loop(model), loop(Tapped())
    assert mask(hook) == "##.........."
    assert differing(outputs, [*exact[:2], *[exact[1]] * 10]) == []


@pytest.mark.parametrize("threshold", [0.0, 1e-12, 0.2, INFINITE])
@pytest.mark.parametrize("settings", list(SETTINGS.values())[:1], ids=list(SETTINGS)[:1])
def test_blocks_that_write_in_place_are_served(settings: dict[str, Any], threshold: float) -> None:
    plain, model = Plain(), InPlace()
    settings = {**settings, "rel_l1_thresh": threshold}
    hooks = [apply_teacache_hook(built, settings) for built in (plain, model)]
    found, expected = loop(model), loop(plain)
    assert mask(hooks[0]) == mask(hooks[1])
    assert differing(found, expected) == []
    assert hooks[1].stats().problem is None
    assert ("." in mask(hooks[1])) is (threshold >= 0.2)


def test_blocks_that_count_their_calls_are_not_disturbed_by_learning() -> None:
    exact = loop(Counting())
    model = Counting()
    apply_teacache_hook(model, {**SKIPPING, "first_steps": 12})
    assert differing(loop(model), exact) == []


class Ending(Plain):
    """Does something at the end of its forward that has to be done."""

    is_open = False

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        assert not self.is_open
        self.is_open = True
        output = super().forward(hidden_states, timestep, encoder_hidden_states)
        self.is_open = False
        return output


@pytest.mark.parametrize("settings", list(SETTINGS.values()), ids=SETTINGS)
def test_a_forward_that_was_begun_always_runs_to_its_end(settings: dict[str, Any]) -> None:
    model = Ending()
    hook = apply_teacache_hook(model, settings)
    loop(model)
    assert "." in mask(hook)
    assert not model.is_open


class Scaling(Plain):
    """Writes into what it is given."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        hidden_states.mul_(0.5)
        return super().forward(hidden_states, timestep, encoder_hidden_states)


def test_a_model_that_writes_into_its_inputs_is_refused_in_words() -> None:
    exact, model = loop(Scaling()), Scaling()
    hook = apply_teacache_hook(model, SKIPPING)
    assert differing(loop(model), exact) == []
    assert hook.stats().problem == "it writes into its inputs"
    assert mask(hook) == "#" * 12


class Secretive(Plain):
    """Its output holds something that nobody can look into."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        return super().forward(hidden_states, timestep, encoder_hidden_states), lambda: None


def test_an_output_that_cannot_be_looked_into_is_never_forecast() -> None:
    model = Secretive()
    hook = apply_teacache_hook(model, SKIPPING)
    assert differing([output for output, _ in loop(model)], loop(Plain())) == []
    assert hook.stats().problem == "its output holds objects that cannot be inspected"


def test_what_a_skipped_step_leaves_out_is_told_with_its_share_of_the_weights() -> None:
    class Heavy(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(4, 4)

    model = Heavy()
    hook = apply_teacache_hook(model, SKIPPING)
    assert hook.stats().coverage is None, "before anything has run"
    loop(model)
    stats = hook.stats()
    assert stats.coverage is not None
    inside = sum(parameter.numel() for parameter in model.blocks.parameters())
    assert stats.coverage.share == pytest.approx(inside / sum(parameter.numel() for parameter in model.parameters()))
    assert str(stats.coverage) in str(stats)
    assert stats.expected_speedup == pytest.approx(12 / (1 + 11 * max(0.01, 1 - stats.coverage.share)))


@dataclass
class Wrapped:
    sample: torch.Tensor


class NamedWrapped(NamedTuple):
    sample: torch.Tensor


class InDataclass(Plain):
    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        return Wrapped(super().forward(hidden_states, timestep, encoder_hidden_states))


class InNamedTuple(Plain):
    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        return NamedWrapped(super().forward(hidden_states, timestep, encoder_hidden_states))


class InDict(Plain):
    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        return {"sample": super().forward(hidden_states, timestep, encoder_hidden_states)}


def samples(outputs: list[Any]) -> list[torch.Tensor]:
    return [output["sample"] if isinstance(output, dict) else output.sample for output in outputs]


class Strict(Plain):
    """Refuses what it does not know, such as a mask that is none."""

    def forward(self, img: torch.Tensor, vec: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("the mask must be made of zeros and ones")
        return super().forward(img * mask[..., None], torch.ones(1), vec)


def test_a_model_that_refuses_what_is_tried_on_it_still_runs() -> None:
    model, mask = Strict(), torch.ones(1, 5)
    with torch.no_grad(), call_context(branch="only"):
        exact = [model(at(step)[0], COND, mask) for step in range(4)]
        apply_teacache_hook(model, {**SKIPPING, "first_steps": 4})
        assert differing([model(at(step)[0], COND, mask) for step in range(4)], exact) == []


class Open(Plain):
    """Takes whatever it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


def test_a_forward_that_names_no_parameters_is_learned_too() -> None:
    model = Open()
    exact = loop(model, steps=4)
    apply_teacache_hook(model, {**SKIPPING, "first_steps": 4})
    assert differing(loop(model, steps=4), exact) == []


class Drawing(Plain):
    """Draws random numbers as it goes."""

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        return super().embed(time, conditioning) + torch.randn(1, 1, self.width)


@pytest.fixture
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.usefixtures("_seeded")
def test_learning_draws_no_random_numbers_of_the_users() -> None:
    model = Drawing()
    torch.manual_seed(0)
    exact = loop(model, steps=4)
    apply_teacache_hook(model, {**SKIPPING, "first_steps": 4})
    torch.manual_seed(0)
    assert differing(loop(model, steps=4), exact) == []


# ------------------------------------------------------------------------------------------------ what seems constant


def wrong_steps(make: Callable[[], torch.nn.Module], schedule: str, *runs: Run) -> list[int]:
    """Which of the computed steps of several runs are not those of the bare model."""
    bare, model = make(), make()
    apply_teacache_hook(model, {"schedule": schedule})
    wrong = [set(differing(run(model), run(bare))) for run in runs]
    return [12 * number + step for number, steps in enumerate(wrong) for step in steps if schedule[step] == "#"]


class Bucketed(Plain):
    """Looks its time up in a table, in which neighbouring times are one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(2, self.width)

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        bucket: torch.Tensor = self.table((time > 0.5).long())
        return bucket[:, None] + super().embed(time, conditioning)


def bucketed() -> Bucketed:
    model = Bucketed()
    with torch.no_grad():
        model.table.weight.copy_(torch.arange(16.0).reshape(2, 8) / 16)
    return model


class Scaled(Plain):
    """Takes a number, and control, next to its conditioning."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        scale: float = 1.0,
        controlnet_cond: torch.Tensor | None = None,
    ) -> torch.Tensor:
        conditioning = encoder_hidden_states * scale
        if controlnet_cond is not None:
            conditioning = conditioning + controlnet_cond
        return super().forward(hidden_states, timestep, conditioning)


@torch.no_grad()
def scaling(model: torch.nn.Module) -> list[torch.Tensor]:
    with call_context(branch="only"):
        return [model(*at(step), COND, scale=0.5) for step in range(12)]


@torch.no_grad()
def rescaling(model: torch.nn.Module) -> list[torch.Tensor]:
    with call_context(branch="only"):
        return [model(*at(step), COND, scale=1.0 if step < 6 else 0.5) for step in range(12)]


@torch.no_grad()
def recontrolling(model: torch.nn.Module) -> list[torch.Tensor]:
    one, other = zoo.cond("one", 1, 4), zoo.cond("other", 1, 4)
    with call_context(branch="only"):
        return [model(*at(step), COND, 1.0, one if step < 6 else other) for step in range(12)]


@torch.no_grad()
def reconditioning(model: torch.nn.Module) -> list[torch.Tensor]:
    conditioning = COND.clone()
    outputs = []
    with call_context(branch="only"):
        for step in range(12):
            if step == 6:
                conditioning.neg_()
            outputs.append(model(*at(step), conditioning))
    return outputs


@pytest.mark.parametrize("runs", [(scaling, rescaling), (recontrolling,) * 2, (reconditioning,) * 2])
def test_what_is_constant_is_so_as_long_as_all_other_inputs_are(runs: tuple[Run, ...]) -> None:
    assert wrong_steps(Scaled, "###.#.####.#", *runs) == []


def test_what_changes_late_is_not_taken_for_constant() -> None:
    assert wrong_steps(bucketed, "###.##.#.#.#", loop, loop) == []


def test_weights_that_were_zero_while_it_was_learned_may_be_loaded_later() -> None:
    class Gateway(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = torch.nn.Linear(4, self.width, bias=False)
            torch.nn.init.zeros_(self.extra.weight)

        def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
            temb = self.embed(timestep, encoder_hidden_states) + self.extra(hidden_states).mean(1, keepdim=True)
            return self.unembed(self.run(self.embed_x(hidden_states), temb))

    models = Gateway(), Gateway()
    for model in models:
        apply_teacache_hook(model, {"schedule": "##.#.#.##.##"})
    loop(models[0])
    with torch.no_grad():
        for model in models:
            model.extra.weight.copy_(torch.arange(32.0).reshape(8, 4) / 32)
    assert differing(*map(loop, models)) == []
