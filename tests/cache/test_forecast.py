"""Forecasts are exact where they can be, cost no stored tensor its value, and keep the form of an output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from samovar.cache.forecast import History, take_apart
from samovar.trace.passes import Outlook

PLACES = (-1.0, -0.93, -0.7, -0.65, -0.2, 0.0)
"""Uneven, as noise levels are."""
A, B, C = (torch.linspace(start, 2.0, 6, dtype=torch.float64).reshape(2, 3) for start in (-1.0, 0.5, 1.5))

Curve = Callable[[float], torch.Tensor]
CURVES: dict[int, Curve] = {
    0: lambda place: A.clone(),
    1: lambda place: A + B * place,
    2: lambda place: A + B * place + C * place**2,
    3: lambda place: A + B * place + C * place**2 - A * place**3,
}


def history(order: int, curve: Curve, steps: int, damping: float = 1.0) -> History:
    """What is known after so many computed steps."""
    known = History(order, damping)
    for place in PLACES[:steps]:
        known.push(place, [curve(place)])
    return known


def forecast(known: History, place: float, index: int = 0) -> torch.Tensor:
    value = known.forecast(place).value(index)
    assert value is not None
    return value


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", CURVES)
@pytest.mark.parametrize("place", [-0.2, 0.0, 0.4])
def test_a_forecast_of_an_order_is_exact_for_curves_of_that_order_and_no_more(order: int, place: float) -> None:
    known = history(order, CURVES[order], 4)
    assert close(forecast(known, place), CURVES[order](place))
    if order < 3:
        higher = history(order, CURVES[order + 1], 4)
        assert not torch.allclose(forecast(higher, place), CURVES[order + 1](place), atol=1e-3)


def test_reuse_gives_the_bits_of_the_last_step() -> None:
    known = history(0, CURVES[2], 3)
    assert torch.equal(forecast(known, 0.3), CURVES[2](PLACES[2]))


def test_only_as_many_steps_are_kept_as_the_order_needs() -> None:
    known = history(1, CURVES[2], 5)
    assert len(known) == 2
    slope = (CURVES[2](PLACES[4]) - CURVES[2](PLACES[3])) / (PLACES[4] - PLACES[3])
    assert close(forecast(known, 0.0), CURVES[2](PLACES[4]) + slope * (0.0 - PLACES[4]))
    known.clear()
    assert len(known) == 0


@pytest.mark.parametrize(("steps", "exact"), [(1, 0), (2, 1), (3, 2)])
def test_a_curve_goes_through_as_many_points_as_there_are(steps: int, exact: int) -> None:
    assert close(forecast(history(2, CURVES[exact], steps), 0.2), CURVES[exact](0.2))


@pytest.mark.parametrize("damping", [0.0, 0.25, 0.9, 1.0])
def test_damping_goes_part_of_the_way_from_reuse_to_the_forecast(damping: float) -> None:
    reused, full = (forecast(history(2, CURVES[2], 4, part), 0.1) for part in (0.0, 1.0))
    assert torch.equal(reused, CURVES[2](PLACES[3]))
    assert not torch.allclose(reused, full, atol=1e-2)
    assert close(forecast(history(2, CURVES[2], 4, damping), 0.1), reused + damping * (full - reused))


def test_fitted_weights_are_those_of_numbered_steps() -> None:
    known = History(2, 0.5)
    for number, place in zip((0, 3, 4, 7), PLACES, strict=False):
        known.push(place, [CURVES[2](place), None], number)
    outlook = known.weighted({7: 2.0, 3: -0.25})
    assert outlook is not None
    value = outlook.value(0)
    assert value is not None
    assert close(value, 2.0 * CURVES[2](PLACES[3]) - 0.25 * CURVES[2](PLACES[1]))
    assert outlook.value(1) is None
    assert torch.equal(known.newest[0], CURVES[2](PLACES[3])), "what is stored stays"  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64])
def test_fitted_weights_that_nearly_cancel_cost_no_precision(dtype: torch.dtype) -> None:
    known, draw = History(2, 1.0), torch.Generator().manual_seed(0)
    stored = [torch.randn(100, generator=draw, dtype=torch.float64).to(dtype) for _ in range(3)]
    weights = {0: 1.625, 1: -4.25, 2: 3.625}
    for number, tensor in enumerate(stored):
        known.push(float(number), [tensor], number)
    outlook = known.weighted(weights)
    assert outlook is not None
    value = outlook.value(0)
    assert value is not None
    assert value.dtype == dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = torch.stack([weights[number] * tensor.to(wide) for number, tensor in enumerate(stored)]).sum(0)
    nearest = (exact.to(dtype).to(wide) - exact).abs()
    assert ((value.to(wide) - exact).abs() <= 1.01 * nearest + 4e-6).all()


@pytest.mark.parametrize("weights", [{0: 1.0}, {5: 1.0}, {7: 1.0, 0: 0.5}], ids=["gone", "never there", "one of two"])
def test_without_a_step_that_it_rests_on_there_is_no_fitted_forecast(weights: dict[int, float]) -> None:
    known = History(2, 1.0)
    for number, place in zip((0, 3, 4, 7), PLACES, strict=False):
        known.push(place, [CURVES[1](place)], number)
    assert known.weighted(weights) is None


def test_where_time_stands_still_the_last_step_is_reused() -> None:
    known = History(1, 1.0)
    known.push(0.5, [A])
    known.push(0.5, [B])
    assert torch.equal(forecast(known, 0.7), B)


def test_each_tensor_of_a_step_is_carried_on_for_itself_and_a_missing_one_stays_missing() -> None:
    known = History(1, 1.0)
    for place in PLACES[:2]:
        known.push(place, [CURVES[1](place), None, 2 * CURVES[1](place)[0]])
    outlook = known.forecast(0.2)
    assert outlook.value(1) is None
    assert close(forecast(known, 0.2, 0), CURVES[1](0.2))
    assert close(forecast(known, 0.2, 2), 2 * CURVES[1](0.2)[0])
    assert known.newest[1] is None


@pytest.mark.parametrize(
    "other",
    [[torch.ones(3)], [torch.ones(2, 3)], [torch.ones(2, 3, dtype=torch.float64), None], [None], []],
    ids=["shape", "dtype", "longer", "missing", "empty"],
)
def test_a_step_of_another_form_starts_anew(other: list[torch.Tensor | None]) -> None:
    known = history(2, CURVES[2], 3)
    known.push(PLACES[3], other)
    assert len(known) == 1
    assert list(known.newest) == other
    values = [known.forecast(0.0).value(index) for index in range(len(other))]
    for value, expected in zip(values, other, strict=True):
        assert value is expected is None or torch.equal(value, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_forecast_changes_nothing_that_is_stored_and_is_nobodys_but_the_askers(order: int) -> None:
    known = History(order, 1.0)
    stored = [CURVES[2](place) for place in PLACES[:3]]
    copies, base = [tensor.clone() for tensor in stored], B.clone()
    for place, tensor in zip(PLACES, stored, strict=False):
        known.push(place, [tensor])
    outlook = known.forecast(0.1)
    first = outlook.value(0)
    added = outlook.added_to(base, 0)
    assert first is not None
    assert close(added, B + first)
    first.zero_()
    added.zero_()
    assert torch.equal(base, B)
    assert all(map(torch.equal, stored, copies))
    assert outlook.value(0).abs().sum() > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_a_forecast_has_the_type_of_what_was_stored(dtype: torch.dtype) -> None:
    known = History(1, 0.9)
    for place, value in ((0.0, 1.0), (1.0, 2.0)):
        known.push(place, [torch.full((2,), value).to(dtype)])
    assert forecast(known, 2.0).dtype == dtype
    assert torch.allclose(forecast(known, 2.0).real.float(), torch.full((2,), 2.9), atol=0.02)
    assert known.forecast(2.0).added_to(torch.zeros(2).to(dtype), 0).dtype == dtype


def test_where_the_tensors_are() -> None:
    assert Outlook([1.0], [[None, torch.empty(1, device="meta")]]).device.type == "meta"
    assert Outlook([1.0], [[None]]).device.type == "cpu"


# ------------------------------------------------------------------------------------------------ whole outputs


def outlook_of(*steps: tuple[float, list[torch.Tensor | None]]) -> Outlook:
    known = History(len(steps) - 1, 1.0)
    for place, tensors in steps:
        known.push(place, tensors)
    return known.forecast(2.0)


FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t,),
    "list": lambda t: [t, 2 * t],
    "nested": lambda t: (t, [{"a": 3 * t, "b": None}, "text"], 7),
    "dict": lambda t: {"sample": t, "note": "kept", "number": 3},
    "diffusers": lambda t: Transformer2DModelOutput(sample=t),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_output_is_put_together_as_it_was(form: Callable[[torch.Tensor], Any]) -> None:
    _, first = take_apart(form(A))
    taken, then = take_apart(form(A + B))
    rebuilt = taken.rebuild(outlook_of((0.0, first), (1.0, then)))
    expected = form(A + 2 * B)
    assert type(rebuilt) is type(expected)
    if isinstance(expected, Transformer2DModelOutput):
        rebuilt, expected = tuple(rebuilt.to_tuple()), expected.to_tuple()
    assert _alike(rebuilt, expected)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return close(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_is_stored_of_an_output_is_a_copy(form: Callable[[torch.Tensor], Any]) -> None:
    given = A.clone()
    taken, tensors = take_apart(form(given))
    given.zero_()
    outlook = outlook_of((0.0, tensors))
    assert _alike(_plain(taken.rebuild(outlook)), _plain(form(A)))
    for tensor in torch.utils._pytree.tree_leaves(taken.rebuild(outlook)):
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    assert _alike(_plain(taken.rebuild(outlook)), _plain(form(A))), "a rebuilt output is not what is stored"


def _plain(output: Any) -> Any:
    return output.to_tuple() if isinstance(output, Transformer2DModelOutput) else output


def test_nothing_that_is_stored_needs_a_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    _, tensors = take_apart((weight * 2,))
    assert tensors[0] is not None
    assert not tensors[0].requires_grad


def test_a_tensor_of_whole_numbers_is_handed_on_as_one() -> None:
    numbers = torch.tensor([3, 1, 2])
    taken, tensors = take_apart((A, numbers))
    rebuilt = taken.rebuild(outlook_of((0.0, tensors), (1.0, list(tensors))))
    assert rebuilt[1].dtype == torch.int64
    assert torch.equal(rebuilt[1], numbers)


@dataclass
class ForeignOutput:
    """As another library may have it: torch does not know how it is put together."""

    sample: torch.Tensor


def test_an_output_of_another_librarys_class_is_forecast_too() -> None:
    steps = []
    for place, value in ((0.0, A), (1.0, A + B)):
        taken, tensors = take_apart(ForeignOutput(value.clone()))
        steps.append((place, tensors))
    rebuilt = taken.rebuild(outlook_of(*steps))
    assert close(rebuilt.sample, A + 2 * B)


@dataclass(slots=True)
class OpaqueOutput:
    """An output into which nobody can look."""

    sample: torch.Tensor


@pytest.mark.parametrize("output", [OpaqueOutput(A), None, ("text", 3)], ids=["opaque", "None", "plain"])
def test_an_output_without_tensors_that_can_be_found_has_nothing_to_forecast(output: Any) -> None:
    """Else what was returned at one step would be returned as it is at the next."""
    assert take_apart(output)[1] is None


def test_an_output_of_another_librarys_class_is_a_new_one_every_time() -> None:
    output = ForeignOutput(A.clone())
    taken, tensors = take_apart(output)
    rebuilt, again = (taken.rebuild(outlook_of((0.0, tensors))) for _ in range(2))
    assert type(rebuilt) is ForeignOutput
    rebuilt.sample.zero_()
    assert torch.equal(again.sample, A)
    assert torch.equal(output.sample, A)
