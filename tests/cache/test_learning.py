"""What is learned of a model when a form of inputs is seen for the first time, and how models are found out that
cannot be skipped."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from driving import (
    COND,
    INFINITE,
    UNGUARDED,
    Block,
    Leaking,
    Plain,
    at,
    differing,
    loop,
)

from samovar.cache import TeaCacheHook, apply_teacache_hook
from samovar.hooks import call_context

SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}


def mask(hook: TeaCacheHook) -> str:
    return hook.stats().branches["only"].mask


# ------------------------------------------------------------------------------------------------ models in the way


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
