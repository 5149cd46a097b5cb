"""What is learnt by skipping a step that was just computed, and how models are found out that cannot be skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from driving import COND, INFINITE, UNCOND, UNGUARDED, Block, Gated, Plain, at, case, counted, differing, loop

import zoo
from samovar.cache import apply_teacache_hook
from samovar.hooks import call_context

KEPT = {
    "FluxTransformer2DModel": [False, True, False, True],
    "Flux2Transformer2DModel": [False, True, True],
    "QwenImageTransformer2DModel": [False, True],
    "SD3Transformer2DModel": [False, True],
    "HunyuanVideoTransformer3DModel": [False, True, False, True, False],
    "WanVACETransformer3DModel": [False, False, True],
    "Krea2Transformer2DModel": [True, True, True],
    "LTXVideoTransformer3DModel": [True],
}
"""By zoo case: which streams of which segments matter for the output or the signal, as read from the model's source."""

Run = Callable[[torch.nn.Module], list[torch.Tensor]]
SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}


@pytest.mark.parametrize("name", KEPT)
def test_only_residuals_that_have_an_effect_are_kept(name: str) -> None:
    gated = Gated(case(name).build())
    trace, attempt = gated.computed(gated.of(case(name)))
    assert attempt.parts is not None
    assert [part is not None for part in attempt.parts] == KEPT[name]
    assert trace.problem is None


def test_a_model_that_can_be_skipped_is_learnt_once() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, SKIPPING)
    with counted([model.embed_x]) as calls:
        loop(model, steps=1)
        learning = len(calls) - 1
        assert learning >= 2
        calls.clear()
        for _ in range(3):
            loop(model, steps=6)
            loop(model, steps=6, conditioning=UNCOND, branch="other")
    assert len(calls) == 36
    assert hook.stats().problem is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_learnt_as_well(dtype: torch.dtype) -> None:
    model = Plain().to(dtype)
    hook = apply_teacache_hook(model, SKIPPING)
    conditioning = COND.to(dtype)
    with torch.no_grad(), call_context(branch="only"):
        outputs = [model(at(0)[0].to(dtype), at(0)[1].to(dtype), conditioning) for _ in range(2)]
    assert (hook.stats().problem, hook.stats().branches["only"].mask) == (None, "#.")
    torch.testing.assert_close(*outputs, rtol=0.05, atol=0.05)


# ------------------------------------------------------------------------------------------------ models in the way


class Leaking(Plain):
    """Its blocks hand something to the end of the forward behind everybody's back."""

    class Block(Block):
        leak: list[torch.Tensor]

        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            self.leak.append(x.mean(dim=1, keepdim=True))
            return super().forward(x, temb)

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        leak: list[torch.Tensor] = []
        for block in self.blocks:
            block.leak = leak
        x = super().run(x, temb)
        return x + sum(leak)


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


@pytest.mark.parametrize("make", [Leaking, Tapped, InPlace])
def test_a_model_that_cannot_be_skipped_stays_exact_and_says_why(
    make: type[Plain], caplog: pytest.LogCaptureFixture
) -> None:
    exact = loop(make())
    model = make()
    hook = apply_teacache_hook(model, SKIPPING)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert differing(loop(model), exact) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is said once"
    assert make.__name__ in caplog.text
    stats = hook.stats()
    assert stats.problem is not None
    assert stats.problem in str(stats)
    assert "differs" in stats.problem
    assert stats.branches["only"].mask == "#" * 12


def test_blocks_that_count_their_calls_are_not_disturbed_by_learning() -> None:
    exact = loop(Counting())
    model = Counting()
    apply_teacache_hook(model, {**SKIPPING, "first_steps": 12})
    assert differing(loop(model), exact) == []


@pytest.mark.parametrize("make", [Leaking, Tapped])
def test_the_output_is_forecast_even_if_blocks_cannot_be_skipped(make: type[Plain]) -> None:
    model = make()
    hook = apply_teacache_hook(model, {**SKIPPING, "forecast_of": "output"})
    outputs, exact = loop(model), loop(make())
    computed = hook.stats().branches["only"].computed
    assert computed <= 2
    assert differing(outputs, [*exact[:computed], *[exact[computed - 1]] * (12 - computed)]) == []


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


@pytest.mark.parametrize("forecast_of", ["residual", "output"])
@pytest.mark.parametrize("make", [InDataclass, InNamedTuple, InDict])
def test_an_output_in_a_form_of_ones_own_is_the_same_output(make: type[Plain], forecast_of: str) -> None:
    """Either it is looked into, or nothing is skipped: what cannot be compared must not pass for equal."""
    settings = {**SKIPPING, "forecast": "linear", "forecast_of": forecast_of, "first_steps": 2}
    plain, model = Plain(), make()
    expected, hook = apply_teacache_hook(plain, settings), apply_teacache_hook(model, settings)
    exact, known, found = loop(Plain()), loop(plain), samples(loop(model))
    if hook.stats().skipped:
        assert hook.stats().branches["only"].mask == expected.stats().branches["only"].mask
        assert differing(found, known) == []
    else:
        assert differing(found, exact) == []


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


def test_a_forward_that_names_no_parameters_is_learnt_too() -> None:
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


def test_what_is_constant_is_not_run_when_steps_are_skipped() -> None:
    name = "FluxTransformer2DModel"
    model = case(name).build()
    apply_teacache_hook(model, {"schedule": "##.."})
    with call_context(branch="only"):
        kept = case(name).inputs(0)
        for step in range(4):
            moving = {key: case(name).inputs(step)[key] for key in ("hidden_states", "timestep")}
            with torch.no_grad(), counted(model.modules()) as calls:
                model(**kept | moving)
    ran = {path for path, module in model.named_modules() if module in calls}
    assert {"x_embedder", "time_text_embed.timestep_embedder", "norm_out", "proj_out"} <= ran
    assert not {"context_embedder", "pos_embed"} & ran


def test_what_is_constant_is_run_again_when_the_conditioning_is_new() -> None:
    """Changed so little that the step is skipped all the same."""
    model = Plain()
    hook = apply_teacache_hook(model, {"schedule": "####...."})
    counts = []
    with torch.no_grad(), call_context(branch="only"):
        other = COND * 1.01
        for step, conditioning in enumerate((COND,) * 5 + (other, other, COND)):
            with counted([model.embed_c]) as calls:
                model(*at(step), conditioning)
            counts.append(len(calls))
    assert hook.stats().branches["only"].mask == "####...."
    assert [counts[step] for step in (4, 5, 7)] == [0, 1, 1]


def test_what_changes_late_is_not_taken_for_constant() -> None:
    assert wrong_steps(bucketed, "###.##.#.#.#", loop, loop) == []


def test_weights_that_were_zero_while_it_was_learnt_may_be_loaded_later() -> None:
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
