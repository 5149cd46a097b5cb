"""The cache "auto": exact where it is told to be, within its tolerance elsewhere, on every kind of pipeline."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driving import differing, flux, hooks_of, masks, recorded, tensors_in

from pipelines import PIPELINES, TinyPipeline
from samovar.cache import AutoConfig, TeaCacheBackend, apply_teacache_hook
from samovar.cache.error_control import ErrorControl
from samovar.core import nested
from samovar.core.errors import SettingError
from samovar.hooks import call_context

STEPS = 9
every = pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)


class Driven(TeaCacheBackend):
    def __init__(self, pipe: Any, tolerance: float | str) -> None:
        super().__init__(AutoConfig(tolerance))
        self.handle = self.enable(pipe)


@every
def test_exact_and_detached_give_the_bits_of_the_bare_pipeline(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    exact = tiny.run(pipe, STEPS)
    for tolerance in ("exact", 0, 1e-12):
        backend = Driven(pipe, tolerance)
        assert torch.equal(tiny.run(pipe, STEPS), exact)
        assert set("".join(masks(backend.stats()))) == {"#"}
        backend.handle.detach()
    Driven(pipe, 1e6).handle.detach()
    assert torch.equal(tiny.run(pipe, STEPS), exact)


@every
def test_a_large_tolerance_skips_and_a_skipped_step_runs_nothing(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    backend = Driven(pipe, 1e6)
    tiny.run(pipe, STEPS)
    found = masks(backend.stats())
    steps = STEPS // len(tiny.denoisers) if len(tiny.denoisers) > 1 else STEPS
    assert all(mask.startswith("###") for mask in found)
    if steps > 4:
        assert all("." in mask for mask in found)
    assert len(found) == len(tiny.denoisers) * (2 if tiny.cfg == "separate" else 1)
    for stats in backend.stats().denoisers.values():
        assert len({branch.mask for branch in stats.branches.values()}) == 1, "branches decide as one"
    assert [state for hook in hooks_of(tiny, pipe) for state in hook.state_manager.states()] == []
    assert [tensor for tensor in tensors_in(*hooks_of(tiny, pipe)) if tensor.numel() > 1] == []


def test_computed_steps_are_the_models_own_but_for_those_behind_skipped_ones() -> None:
    pipe = flux.build(0)
    backend = Driven(pipe, 0.3)
    with recorded(pipe.transformer) as recorder:
        flux.run(pipe, STEPS)
    (stats,) = backend.stats().denoisers.values()
    backend.handle.detach()
    for index, branch in enumerate(stats.branches.values()):
        computed = [step for step, sign in enumerate(branch.mask) if sign == "#"]
        assert 3 < len(computed) < STEPS
        calls, outputs = recorder.calls[index::2], recorder.outputs[index::2]
        with torch.no_grad():
            bare = [pipe.transformer(*calls[step][0], **calls[step][1])[0] for step in computed]
        behind = [place for place, step in enumerate(computed) if branch.mask[step - 1 : step] == "."]
        assert differing([outputs[step] for step in computed], bare) == behind, "they take back what was missed"


# ------------------------------------------------------------------------------------------------ a model that is known


_CALLS: Counter[int] = Counter()
"""Of each model. In an attribute a count would be a state that the model keeps."""


class Known(torch.nn.Module):
    """The exact flow of normally distributed images around a mean, which is the conditioning."""

    def __init__(self, deviation: float = 0.5) -> None:
        super().__init__()
        self.deviation = torch.nn.Parameter(torch.tensor(deviation), requires_grad=False)
        self.calls = 0

    @property
    def calls(self) -> int:
        return _CALLS[id(self)]

    @calls.setter
    def calls(self, count: int) -> None:
        _CALLS[id(self)] = count

    def forward(
        self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        self.calls += 1
        time, square = timestep.reshape(-1, *[1] * (sample.dim() - 1)), self.deviation**2
        spread = (1 - time) ** 2 * square + time**2
        centre = (1 - time) * encoder_hidden_states
        away = sample - centre
        clean = encoder_hidden_states + (1 - time) * square / spread * away
        noise = time / spread * away
        return noise - clean


def sampled(
    model: Known,
    mean: torch.Tensor,
    steps: int = 50,
    seed: int = 0,
    scale: float = 1.0,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """Euler's method with guidance, in a loop of one's own."""
    sample = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed)) if start is None else start
    times = torch.linspace(1, 0, steps + 1)
    for now, then in itertools.pairwise(times):
        with torch.no_grad():
            with call_context(branch="cond"):
                output = model(sample, now.expand(len(mean)), mean)
            if scale != 1:
                with call_context(branch="uncond"):
                    bare = model(sample, now.expand(len(mean)), torch.zeros_like(mean))
                output = bare + scale * (output - bare)
        sample = sample + (then - now) * output
    return sample


MEAN = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("steps", [28, 50])
@pytest.mark.parametrize("scale", [1.0, 4.5])
@pytest.mark.parametrize("tolerance", [0.02, 0.06])
def test_the_result_stays_within_a_few_tolerances(steps: int, scale: float, tolerance: float) -> None:
    model = Known()
    exact = sampled(model, MEAN, steps, scale=scale)
    hook = apply_teacache_hook(model, AutoConfig(tolerance))
    hook.refresh(model, steps)
    model.calls = 0
    found = sampled(model, MEAN, steps, scale=scale)
    stats = hook.stats()
    assert (model.calls, stats.skipped > 0) == (stats.computed, True)
    worst = float(((found - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max())
    gaps = max(sum(1 for gap in branch.mask.split("#") if gap) for branch in stats.branches.values())
    assert 0 < worst <= 2 * gaps * tolerance


@pytest.mark.parametrize("scale", [1.0, 2.0, 4.5])
def test_what_was_missed_is_taken_back(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, errors = sampled(Known(), MEAN, scale=scale), []
    for takes_back in (False, True):
        if not takes_back:
            monkeypatch.setattr(ErrorControl, "_correction", lambda control, length: {})
        model = Known()
        hook = apply_teacache_hook(model, AutoConfig(0.06))
        hook.refresh(model, 50)
        errors.append(float((sampled(model, MEAN, scale=scale) - exact).norm()))
        monkeypatch.undo()
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("images", [1, 2])
def test_branches_in_one_batch_are_judged_as_those_of_their_own(images: int) -> None:
    """Guidance multiplies an error however the branches are called."""
    mean, masks = MEAN[:images], []
    for stacked in (False, True):
        model = Known()
        hook = apply_teacache_hook(model, AutoConfig(0.03))
        found = sampled_as_a_batch(model, mean) if stacked else sampled(model, mean, 28, scale=4.5)
        stats = hook.stats().branches["cond"]
        masks.append((stats.mask, found))
    (mask, one), (same, other) = masks
    assert "." in mask
    assert mask == same
    assert torch.allclose(one, other, atol=1e-4)


def sampled_as_a_batch(model: Known, mean: torch.Tensor, steps: int = 28, scale: float = 4.5) -> torch.Tensor:
    """The same as `sampled`, with both branches in one call."""
    sample = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    conditioning = torch.cat([torch.zeros_like(mean), mean])
    for now, then in itertools.pairwise(torch.linspace(1, 0, steps + 1)):
        with torch.no_grad(), call_context(branch="cond"):
            bare, output = model(torch.cat([sample, sample]), now.expand(2 * len(mean)), conditioning).chunk(2)
        sample = sample + (then - now) * (bare + scale * (output - bare))
    return sample


def test_where_nothing_can_be_forecast_nothing_is_skipped() -> None:
    class Random(Known):
        def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
            self.calls += 1
            return torch.randn(sample.shape, generator=torch.Generator().manual_seed(self.calls))

    model = Random()
    hook = apply_teacache_hook(model, AutoConfig("high"))
    sampled(model, MEAN, 28)
    assert hook.stats().skipped == 0
    assert set(hook.stats().branches["cond"].reasons()) == {
        "first_steps",
        "skipping one step would exceed the tolerance",
    }


class Mixed(Known):
    """Images with a mean above 5 cannot be forecast."""

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        output = super().forward(sample, timestep, encoder_hidden_states)
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(self.calls))
        return torch.where((encoder_hidden_states.flatten(1).mean(1) > 5).reshape(-1, 1, 1, 1), noise, output)


def test_the_worst_image_of_a_batch_decides_for_all() -> None:
    easy, hard = MEAN[:1], MEAN[1:] + 10
    skipped = []
    for mean in (easy, torch.cat([easy, hard])):
        model = Mixed()
        hook = apply_teacache_hook(model, AutoConfig(0.05))
        start = torch.randn(MEAN.shape, generator=torch.Generator().manual_seed(1))[: len(mean)]
        sampled(model, mean, 28, start=start)
        assert model.calls == hook.stats().computed
        skipped.append(hook.stats().skipped)
    assert skipped[0] > 0
    assert skipped[1] == 0


def test_images_with_the_same_seed_are_not_taken_for_branches_of_guidance() -> None:
    """At the first step their samples are equal, and the way of the first tells nothing of the second's error."""
    model, start = Mixed(), torch.randn(MEAN[:1].shape, generator=torch.Generator().manual_seed(0))
    hook = apply_teacache_hook(model, AutoConfig(0.05))
    sampled(model, torch.cat([MEAN[:1], MEAN[1:] + 10]), 28, start=torch.cat([start, start]))
    assert hook.stats().skipped == 0


class Sharing(Known):
    """Images of a batch depend on each other while `share` is set, as with attention that is shared between them."""

    share = 0.0
    reference: torch.Tensor | None = None

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        output = super().forward(sample, timestep, encoder_hidden_states)
        output = (1 - self.share) * output + self.share * output.mean(0, keepdim=True)
        return output if self.reference is None else output + self.reference


@pytest.mark.parametrize("change", [{"share": 0.5}, {"reference": 0.1 * MEAN}], ids=["share", "reference"])
def test_images_that_begin_to_depend_on_each_other_are_as_if_they_always_had(change: dict[str, Any]) -> None:
    found, masks = [], []
    for plain_first in (False, True):
        model = Sharing()
        hook = apply_teacache_hook(model, AutoConfig(0.01))
        if plain_first:
            sampled(model, MEAN, 40)
        vars(model).update(change)
        hook.refresh(model, 40)
        found.append(sampled(model, MEAN, 40))
        masks.append(hook.stats().branches["cond"].mask)
    assert "." in masks[0]
    assert masks[0] == masks[1]
    assert torch.equal(*found)


def test_channels_of_an_unbatched_sample_are_no_images() -> None:
    """Z-Image takes a list of samples, without a dimension for a batch."""
    tiny = PIPELINES["z-image"]
    pipe = tiny.build(0)
    exact = tiny.run(pipe, 20, guidance_scale=0.0)
    backend = Driven(pipe, 0.1)
    near = tiny.run(pipe, 20, guidance_scale=0.0)
    (stats,) = backend.stats().denoisers.values()
    assert 0 < stats.computed < 12, "the worst of its channels would compute 13"
    assert stats.error is not None
    assert float((near - exact).norm() / exact.norm()) < 3 * max(stats.error, 0.1)


# ------------------------------------------------------------------------------------------------ what is never skipped


@pytest.mark.parametrize("changed", ["conditioning", "weights"])
def test_what_is_stored_does_not_outlive_a_change(changed: str) -> None:
    model = Known()
    hook = apply_teacache_hook(model, AutoConfig(1e6))
    sample = torch.randn(1, 4, 8, 8)
    with torch.no_grad(), call_context(branch="cond"):
        for step in range(12):
            if step == 5 and changed == "weights":
                model.deviation.mul_(2)
            mean = torch.full((1, 4, 8, 8), float(step >= 5 and changed == "conditioning"))
            model(sample * (1 + step), torch.tensor([1 - step / 12]), mean)
    mask = hook.stats().branches["cond"].mask
    assert mask[3] == "."
    assert mask[5:8] == "###", "three more before the next is skipped"


class Strange(Known):
    """Does one thing more."""

    def __init__(self, does: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.does, self.step, self.last, self.store = does, 0, torch.zeros(()), SimpleNamespace(outputs=[])
        self.register_buffer("total", torch.zeros(()))

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor) -> Any:
        return self.does(self, super().forward(sample, timestep, encoder_hidden_states), encoder_hidden_states)


def counts(model: Any, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    model.step += 1
    return output * (1.3 if model.step <= 5 else 1.0)


def remembers(model: Any, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    model.last, before = output, model.last
    return 0.5 * output + 0.5 * before


def collects(model: Any, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    model.store.outputs.append(output)
    return torch.stack(model.store.outputs[-3:]).sum(0)


_KEEPS = "it keeps something from step to step in its "
STRANGE: dict[str, tuple[Callable[[Any, torch.Tensor, torch.Tensor], Any], str]] = {
    "writes into its inputs": (lambda m, output, text: output + text.add_(1), "it writes into its inputs"),
    "returns no numbers": (lambda m, output, text: {"tokens": (output > 0).long()}, ""),
    "a buffer": (lambda m, output, text: output + m.total.add_(1), f"{_KEEPS}buffers"),
    "a count": (counts, f"{_KEEPS}attributes"),
    "an attribute": (remembers, f"{_KEEPS}attributes"),
    "a list in an object": (collects, f"{_KEEPS}attributes"),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", STRANGE)
def test_a_model_that_does_more_than_return_its_output_is_computed(name: str, mode: Any) -> None:
    does, problem = STRANGE[name]

    def run(model: Known) -> list[Any]:
        with mode(), call_context(branch="cond"):
            text = torch.zeros(1, 4, 8, 8)
            return [model(MEAN[:1, :, :8, :8] * (1 + step), torch.tensor([1 - step / 8]), text) for step in range(8)]

    model = Strange(does)
    hook = apply_teacache_hook(model, AutoConfig(1e6))
    assert nested.equal(run(model), run(Strange(does)))
    assert hook.stats().skipped == 0
    assert problem in str(hook.stats())


def test_what_a_model_makes_once_is_no_state() -> None:
    def fills(model: Any, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        model.last = model.last if model.last.dim() else torch.ones(3)
        return output

    model = Strange(fills)
    hook = apply_teacache_hook(model, AutoConfig("high"))
    sampled(model, MEAN, 28)
    assert hook.stats().skipped > 0


def test_a_sample_that_is_changed_inside_a_gap_is_computed() -> None:
    """By a callback that replaces or blends the latents."""

    def run(edited: int | None) -> tuple[str, list[str]]:
        model = Known()
        hook = apply_teacache_hook(model, AutoConfig(0.1))
        hook.refresh(model, 50)
        sample = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
        times = torch.linspace(1, 0, 51)
        for step in range(50):
            if step == edited:
                sample[:, :, :8] = torch.randn(1, 4, 8, 16, generator=torch.Generator().manual_seed(1))
            with torch.no_grad(), call_context(branch="cond"):
                sample = sample + (times[step + 1] - times[step]) * model(sample, times[step].expand(1), MEAN[:1])
        branch = hook.stats().branches["cond"]
        return branch.mask, [record.reason for record in branch.steps]

    mask, reasons = run(None)
    edited = mask.index("..", 20) + 1
    assert not any("changed" in reason for reason in reasons)
    mask, reasons = run(edited)
    assert reasons[edited] == "the sample was changed between steps"
    assert mask[edited : edited + 3] == "###"
    assert "." in mask[edited + 3 :]


def test_skipping_goes_on_when_guidance_ends() -> None:
    model = Known()
    hook = apply_teacache_hook(model, AutoConfig("fast"))
    hook.refresh(model, 60)
    times = torch.linspace(1, 0, 61)
    sample = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    for step in range(60):
        with torch.no_grad():
            output = torch.zeros(())
            for branch in ("uncond", "cond") if step < 20 else ("cond",):
                with call_context(branch=branch):
                    output = model(sample, times[step].expand(1), MEAN[:1] * (branch == "cond"))
        sample = sample + (times[step + 1] - times[step]) * output
    mask = hook.stats().branches["cond"].mask
    assert "." in mask[:20]
    assert mask[30:].count(".") > 15


@pytest.mark.parametrize(("steps", "skips"), [(7, False), (8, True)])
def test_short_runs_are_left_alone(steps: int, skips: bool) -> None:
    pipe = flux.build(0)
    exact = flux.run(pipe, steps)
    backend = Driven(pipe, 1e6)
    assert torch.equal(flux.run(pipe, steps), exact) is not skips
    assert (backend.stats().skipped > 0) is skips
    assert skips or "min_steps" in str(backend.stats())


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tolerance": "hihg"}, "high"),
        ({"tolerance": -1}, "a number, 0 or more"),
        ({"tolerance": True}, "a number, 0 or more"),
        ({"tolerence": 0.1}, "tolerance"),
        ({"rel_l1_thresh": 0.1}, "rel_l1_thresh"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        AutoConfig.read(settings)


def test_the_error_is_told() -> None:
    pipe = flux.build(0)
    backend = Driven(pipe, 0.3)
    flux.run(pipe, STEPS)
    (stats,) = backend.stats().denoisers.values()
    steps = next(iter(stats.branches.values())).steps
    judged = [step for step in steps if step.distance is not None]
    assert judged[0].step == 3
    assert all(steps[step.step - 1].computed for step in judged), "after each computed step"
    assert stats.error == steps[-1].accumulated
    sums = [step.accumulated or 0.0 for step in steps]
    for first in (step.step for step in steps if not step.computed and steps[step.step - 1].computed):
        assert sums[first] > sums[first - 2], "a gap counts from its first step on, the last one too"
    assert "estimated error of all skipped steps: " in str(stats)
    assert stats.to_dict()["error"] == pytest.approx(stats.error, abs=1e-6)
