"""Whether a step may be skipped: by guards and schedules, by a model's own polynomial, and by what has changed."""

from __future__ import annotations

import functools
import math
from typing import Any

import diffusers
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines import PIPELINES
from samovar.cache import TeaCacheConfig, apply_teacache_hook
from samovar.cache.call import Verdict
from samovar.cache.clock import Step
from samovar.cache.signal import Coefficients, Measured, Signal, known_coefficients, measure, rescaling
from samovar.cache.threshold import judge
from samovar.core.errors import SettingError

UNGUARDED: dict[str, Any] = {"last_steps": 0, "max_skips": None, "min_steps": 0}
ASK = Verdict("ask", "")


def verdict(settings: dict[str, Any], step: Step, skipped_in_a_row: int = 0) -> Verdict:
    """What one guard alone says."""
    return judge(TeaCacheConfig.read(UNGUARDED | settings), step, skipped_in_a_row, "cond")


def whole(number: int, total: int | None) -> Step:
    """A step of a run that goes through all of them."""
    return Step(number, total=total, run_length=total)


@pytest.mark.parametrize("total", [1, 10, None])
def test_without_guards_all_steps_but_the_first_are_left_to_the_signal(total: int | None) -> None:
    assert verdict({}, whole(0, total)) == Verdict("compute", "first_steps")
    for number in range(1, total or 20):
        assert verdict({}, whole(number, total), skipped_in_a_row=number) == ASK


@pytest.mark.parametrize(
    ("settings", "total", "computed"),
    [
        ({"first_steps": 3}, 10, {0, 1, 2}),
        ({"first_steps": 10}, 10, set(range(10))),
        ({"first_steps": 3}, None, {0, 1, 2}),
        ({"last_steps": 1}, 10, {0, 9}),
        ({"last_steps": 3}, 10, {0, 7, 8, 9}),
        ({"last_steps": 20}, 10, set(range(10))),
        ({"last_steps": 3}, None, {0}),
        ({"start": 0.25}, 8, {0, 1}),
        ({"start": 0.26}, 8, {0, 1, 2}),
        ({"end": 0.75}, 8, {0, 6, 7}),
        ({"end": 0.74}, 8, {0, 6, 7}),
        ({"end": 0.76}, 8, {0, 7}),
        ({"start": 0.25, "end": 0.75}, 8, {0, 1, 6, 7}),
        ({"start": 0.5, "end": 0.5}, 8, set(range(8))),
        ({"start": 1.0}, 8, set(range(8))),
        ({"end": 0.0}, 8, set(range(8))),
        ({"min_steps": 8}, 7, set(range(7))),
        ({"min_steps": 8}, 8, {0}),
        ({"min_steps": 8}, None, {0}),
    ],
)
def test_each_guard_alone(settings: dict[str, Any], total: int | None, computed: set[int]) -> None:
    reason = {"start": "window", "end": "window"}.get(name := next(iter(settings)), name)
    for number in range(total or 10):
        expected = Verdict("compute", reason) if number in computed else ASK
        found = verdict(settings, whole(number, total))
        assert found == expected or (number == 0 and found == Verdict("compute", "first_steps")), number


def test_at_most_so_many_skips_in_a_row() -> None:
    step = whole(5, 10)
    assert [verdict({"max_skips": 2}, step, skipped).action for skipped in range(4)] == ["ask", "ask"] + ["compute"] * 2
    assert verdict({"max_skips": 2}, step, 2).reason == "max_skips"
    assert verdict({"max_skips": None}, step, 1000) == ASK


def test_the_guards_that_are_on_by_default() -> None:
    """The mask of a run whose signal never moves."""

    def mask(total: int, **settings: Any) -> str:
        config, skipped, signs = TeaCacheConfig(**settings), 0, ""
        for number in range(total):
            is_computed = judge(config, whole(number, total), skipped, "cond").action == "compute"
            skipped = 0 if is_computed else skipped + 1
            signs += "#" if is_computed else "."
        return signs

    assert mask(7) == "#" * 7
    assert mask(8) == "#....#.#"
    assert mask(12) == "#....#....##"
    assert mask(12, max_skips=None, first_steps=2, last_steps=2) == "##........##"
    assert mask(12, rel_l1_thresh=0) == "#" * 12


def test_a_run_that_starts_half_way_has_first_steps_too() -> None:
    """Image to image: the scheduler has ten steps, and the run takes the last six of them."""
    computed = [
        number for number in range(4, 10) if verdict({"first_steps": 2}, Step(number, total=10, run_length=6)) != ASK
    ]
    assert computed == [4, 5]


def test_the_length_of_the_run_and_not_of_the_scheduler_is_what_may_be_too_short() -> None:
    assert verdict({"min_steps": 8}, Step(15, total=20, run_length=7)) == Verdict("compute", "min_steps")
    assert verdict({"min_steps": 8}, Step(15, total=20, run_length=8)) == ASK


def test_settings_that_never_skip_come_first() -> None:
    for settings in ({"rel_l1_thresh": 0}, {"schedule": "#" * 10}):
        assert [verdict(settings, whole(n, 10)) for n in range(10)] == [Verdict("compute", "settings")] * 10


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("total", [4, None])
def test_a_schedule_is_followed_whatever_the_guards_say(total: int | None) -> None:
    config = TeaCacheConfig(schedule="#..#", max_skips=1, min_steps=8, last_steps=2, first_steps=3, end=0.0)
    found = [judge(config, whole(number, total), 3, "cond") for number in range(4)]
    assert found == [Verdict(action, "schedule") for action in ("compute", "skip", "skip", "compute")]


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (whole(0, 3), "for 4 steps, and this run has 3 steps"),
        (whole(0, 5), "for 4 steps, and this run has 5 steps"),
        (whole(3, 5), "for 4 steps, and this run has 5 steps"),
        (whole(4, None), "for 4 steps, and this run has a step number 5"),
        (whole(4, 4), "for 4 steps"),
    ],
)
def test_a_schedule_of_another_length_is_refused(step: Step, says: str) -> None:
    with pytest.raises(SettingError, match=says):
        judge(TeaCacheConfig(schedule="#..#"), step, 0, "cond")


def test_a_schedule_of_another_length_is_refused_even_if_it_skips_nothing() -> None:
    with pytest.raises(SettingError, match="for 4 steps, and this run has 5 steps"):
        judge(TeaCacheConfig(schedule="####"), whole(0, 5), 0, "cond")


def test_each_branch_has_its_own_schedule() -> None:
    config = TeaCacheConfig(schedule={"cond": "#.#.", "uncond": "##.."})
    found = {
        branch: "".join("#" if judge(config, whole(n, 4), 0, branch).action == "compute" else "." for n in range(4))
        for branch in ("cond", "uncond", "other")
    }
    assert found == {"cond": "#.#.", "uncond": "##..", "other": "####"}
    assert judge(config, whole(1, 4), 0, "other") == Verdict("compute", "no schedule for this branch")
    others = TeaCacheConfig(schedule={"cond": "#.#.", "*": "#..."})
    assert [judge(others, whole(2, 4), 0, branch).action for branch in ("cond", "other")] == ["compute", "skip"]


def test_a_branchs_schedule_of_another_length_is_refused() -> None:
    with pytest.raises(SettingError, match="schedule is for 4 steps, and this run has 5 steps"):
        judge(TeaCacheConfig(schedule={"*": "#..#"}), whole(0, 5), 0, "cond")


# ------------------------------------------------------------------------------------------------ coefficients

FLUX = "FluxTransformer2DModel"
QWEN = "QwenImageTransformer2DModel"
GIVEN = (1.0, 0.0, -2.0, 3.0, 0.5)


@functools.cache
def model(pipeline: str) -> torch.nn.Module:
    transformer: torch.nn.Module = PIPELINES[pipeline].build(0).transformer
    return transformer


def test_what_is_known_has_five_finite_numbers_and_an_origin_and_is_a_class_of_diffusers() -> None:
    known = known_coefficients()
    assert known[FLUX].values == (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861)
    assert known[QWEN].values == (-450.0, 280.0, -45.0, 3.2, -0.02)
    for name, (values, origin) in known.items():
        assert len(values) == 5
        assert all(map(math.isfinite, values))
        assert origin.strip()
        assert hasattr(diffusers, name)


@pytest.mark.parametrize("distance", [0.0, 0.01, 0.1, 0.3])
def test_the_polynomial_has_its_highest_power_first_and_is_never_negative(distance: float) -> None:
    a, b, c, d, e = GIVEN
    value = a * distance**4 + b * distance**3 + c * distance**2 + d * distance + e
    assert rescaling(Coefficients(GIVEN, ""))(distance) == pytest.approx(max(value, 0.0))
    assert rescaling(Coefficients((0.0, 0.0, 0.0, 0.0, -1.0), ""))(distance) == distance, "it says nothing here"
    assert rescaling(None)(distance) == distance


@pytest.mark.parametrize("name", known_coefficients())
@pytest.mark.parametrize("distance", [0.45, 0.5, 1.0, 2.0, 10.0, math.inf])
def test_a_large_change_is_never_taken_for_none(name: str, distance: float) -> None:
    """Beyond where they were fitted polynomials fall below zero; the signal of another picture must still count."""
    rescaled = rescaling(known_coefficients()[name])(distance)
    assert not rescaled < 0.4, "it would be skipped at the fast setting"


def test_what_is_not_a_number_is_not_below_any_threshold() -> None:
    for coefficients in (None, known_coefficients()[FLUX]):
        for threshold in (0.2, math.inf):
            assert not rescaling(coefficients)(math.nan) < threshold


class MyFluxTransformer2DModel(diffusers.FluxTransformer2DModel):
    """Only like a known one."""


@pytest.mark.parametrize(
    ("name", "settings", "says", "values"),
    [
        ("flux", {}, "rescaled by the coefficients of FLUX.1-dev", known_coefficients()[FLUX].values),
        ("flux", {"coefficients": GIVEN}, "rescaled by the coefficients of the settings", GIVEN),
        ("flux2-klein", {}, "not rescaled", None),
        ("flux2-klein", {"transformer_type": FLUX}, "of FLUX.1-dev", known_coefficients()[FLUX].values),
        ("mine", {}, "not rescaled", None),
    ],
)
def test_coefficients_are_those_given_else_of_the_models_own_class_else_none(
    name: str, settings: dict[str, Any], says: str, values: tuple[float, ...] | None
) -> None:
    own = MyFluxTransformer2DModel(num_layers=1, num_single_layers=0, num_attention_heads=1, attention_head_dim=8,
                                   axes_dims_rope=(2, 2, 4)) if name == "mine" else model(name)  # fmt: skip
    hook = apply_teacache_hook(own, settings)
    assert says in hook.stats().signal
    expected = rescaling(None if values is None else Coefficients(values, ""))
    assert hook.rescale_func(0.07) == expected(0.07)
    hook.detach()


# ------------------------------------------------------------------------------------------------ the signal


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `tolist` of a tensor on the host reads its memory, which cannot be seen; its `stack` can.
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.stack.default)
        return func(*args, **(kwargs or {}))


def pair(change: float, size: float) -> list[torch.Tensor]:
    return [torch.tensor(change), torch.tensor(size)]


def test_the_change_of_a_signal_is_its_relative_l1_distance() -> None:
    before, now = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    found = Signal(before).change(Signal(now))
    assert found is not None
    expected = (now - before).abs().mean() / before.abs().mean()
    assert measure(found, (), None).signal == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_do_not_overflow_or_stall(dtype: torch.dtype) -> None:
    before = torch.full((1, 1000, 1000), 3.0, dtype=dtype)
    found = Signal(before).change(Signal(before * 1.25))
    assert found is not None
    assert measure(found, (), None).signal == pytest.approx(0.25, rel=1e-3)


def test_signals_of_another_form_or_place_cannot_be_compared() -> None:
    signal = Signal(torch.ones(1, 3), "attn1")
    assert signal.change(Signal(torch.ones(1, 3), "attn1")) is not None
    assert signal.change(Signal(torch.ones(1, 3), "attn2")) is None
    assert signal.change(Signal(torch.ones(2, 3), "attn1")) is None
    assert signal.change(Signal(torch.ones(1, 3, device="meta"), "attn1")) is None


def test_a_signal_keeps_no_graph() -> None:
    assert not Signal(torch.ones(1, requires_grad=True) * 2).value.requires_grad


def test_all_that_changed_is_read_at_once() -> None:
    with Reads() as reads:
        found = measure(pair(1.0, 4.0), [pair(0.0, 0.0), pair(1.0, 2.0)], None)
    assert found == Measured(0.25, 0.5)
    assert reads.count == 1


@pytest.mark.parametrize(
    ("change", "size", "relative"), [(0.0, 0.0, 0.0), (1.0, 0.0, float("inf")), (0.0, 2.0, 0.0), (1.0, 2.0, 0.5)]
)
def test_what_was_nothing_and_is_something_has_changed_beyond_measure(
    change: float, size: float, relative: float
) -> None:
    assert measure(pair(change, size), (), None).signal == relative
    assert measure(pair(0.0, 1.0), [pair(change, size)], None).others == relative


def test_what_is_no_number_is_never_small() -> None:
    nan = float("nan")
    assert not measure(pair(nan, 1.0), (), None).signal < 1e9
    assert not measure(pair(0.0, 1.0), [pair(nan, 1.0)], None).others < 1e9
    assert not measure(pair(0.0, 1.0), [pair(0.0, 1.0), pair(nan, 1.0)], None).others < 1e9


class Two:
    """Two ranks: this one, and one with figures of its own."""

    def __init__(self, theirs: torch.Tensor) -> None:
        self._theirs = theirs
        self.asked: list[tuple[str, list[float]]] = []

    def __call__(self, figures: torch.Tensor) -> torch.Tensor:
        self.asked.append(("all", figures.tolist()))
        return figures + self._theirs

    def within_branch(self, figures: torch.Tensor) -> torch.Tensor:
        self.asked.append(("branch", figures.tolist()))
        return figures + self._theirs


@pytest.mark.parametrize("others", [[], [(1.0, 4.0)], [(1.0, 8.0), (1.0, 2.0), (0.0, 0.0)]], ids=len)
def test_ranks_agree_on_as_many_sums_whatever_changed(others: list[tuple[float, float]]) -> None:
    """Another rank has changes of its own; time is the same for all."""
    agree = Two(torch.tensor([3.0, 4.0, 0.5, 1.0]))
    found = measure(pair(1.0, 4.0), [pair(*other) for other in others], agree)
    largest = max((change / size for change, size in others if change), default=0.0)
    assert agree.asked == [("all", [1.0, 4.0, largest, 1.0])]
    assert found == Measured(0.5, (largest + 0.5) / 2)


def test_a_rank_without_a_signal_makes_all_of_them_compute() -> None:
    found = measure(None, (), Two(torch.tensor([0.1, 1.0, 0.0, 1.0])), torch.device("cpu"))
    assert found.signal == float("inf")
    assert measure(None, (), None).signal == float("inf")


def test_a_branch_may_decide_for_itself() -> None:
    agree = Two(torch.tensor([1.0, 4.0, 0.0, 1.0]))
    assert measure(pair(1.0, 4.0), (), agree, within_branch=True).signal == 0.25
    assert [kind for kind, _ in agree.asked] == ["branch"]


def test_conditioning_that_changed_on_one_rank_has_changed_on_all() -> None:
    agree = Two(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert measure(pair(0.0, 1.0), [pair(1.0, 0.0)], agree).others == float("inf")
