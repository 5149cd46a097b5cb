"""What a denoiser is called with: which calls are alike, and what has changed that should not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.cache.decision import _relative as relative
from samovar.cache.inputs import Inputs, Pair, Sample, changes, some, watch
from samovar.hooks import Roles
from samovar.hooks.roles import leaves_of

NAMES = ("hidden_states", "timestep", "encoder_hidden_states", "controlnet_block_samples", "attention_kwargs")
INFINITE = float("inf")


def inputs(*args: Any, **kwargs: Any) -> Inputs:
    return Inputs(args, kwargs, NAMES, Roles())


def text(*values: float) -> torch.Tensor:
    return torch.tensor(values or (1.0, -2.0, 3.0))


def distances(now: Inputs, before: Inputs) -> list[float]:
    """How much each changed tensor has changed, as it would be judged."""
    return relatives(changes(now, watch(before)))


def relatives(pairs: list[Pair]) -> list[float]:
    return [relative(*(float(part) for part in pair)) for pair in pairs]


# ------------------------------------------------------------------------------------------------ which calls are alike


def test_arguments_have_the_names_of_their_parameters() -> None:
    given = inputs(text(), text(), text(), attention_kwargs={"scale": text(), "more": [text()]})
    paths = [path for path, _, _ in given.watched]
    assert paths == ["encoder_hidden_states", "attention_kwargs.scale", "attention_kwargs.more.0"]


def test_calls_that_differ_in_values_alone_are_alike() -> None:
    one = inputs(torch.zeros(2, 3), torch.tensor([1.0]), text(), [torch.ones(2)], {"scale": 1.0, "ids": torch.ones(1)})
    other = inputs(
        torch.ones(2, 3), torch.tensor([0.5]), 2 * text(), [torch.zeros(2)], {"scale": 1.0, "ids": text(7.0)}
    )
    assert one.signature == other.signature
    assert hash(one.signature) == hash(other.signature)


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_states": torch.zeros(2, 4)},
        {"hidden_states": torch.zeros(2, 3, dtype=torch.float64)},
        {"hidden_states": torch.zeros(2, 3, device="meta")},
        {"hidden_states": [torch.zeros(2, 3)]},
        {"encoder_hidden_states": None},
        {"encoder_hidden_states": torch.zeros(1, 4)},
        {"controlnet_block_samples": []},
        {"controlnet_block_samples": [torch.ones(2)] * 2},
        {"controlnet_block_samples": None},
        {"attention_kwargs": {"other": 1.0}},
        {"attention_kwargs": {}},
        {"guidance": 2.0},
        {"return_dict": False},
    ],
    ids=str,
)
def test_calls_that_may_do_something_else_with_their_blocks_are_not_alike(other: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "hidden_states": torch.zeros(2, 3),
        "encoder_hidden_states": torch.zeros(1, 3),
        "controlnet_block_samples": [torch.ones(2)],
        "attention_kwargs": {"scale": 1.0},
    }
    assert inputs(**given).signature != inputs(**given | other).signature
    assert inputs(**given).signature == inputs(**given).signature


def test_numbers_are_of_one_form_but_not_the_same() -> None:
    """A scale that changes at every step is no new form each time, of which something would be remembered."""
    one, other = (inputs(torch.zeros(2), torch.tensor([1.0]), {"scale": scale}, [2.0, 3]) for scale in (1.0, 0.5))
    assert one.signature == other.signature
    assert (one.numbers, other.numbers) == ((1.0, 2.0), (0.5, 2.0))
    assert inputs(torch.zeros(2), 1.0).numbers == (), "a time is none of them"


def test_autocast_makes_calls_unlike() -> None:
    plain = inputs(torch.zeros(2)).signature
    signatures = []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            signatures.append(inputs(torch.zeros(2)).signature)
    assert len({plain, *signatures}) == 3
    assert inputs(torch.zeros(2)).signature == plain


def test_a_time_under_a_name_of_its_own_does_not_make_calls_unlike_once_it_is_known() -> None:
    roles = Roles()
    one, other = (Inputs((torch.zeros(2), when), {}, ("img", "when"), roles) for when in (3, 2))
    assert one.signature != other.signature
    roles.note_output(torch.zeros(2))
    roles.note_changing(leaves_of(("img", "when"), one.args, {}), ["img", "when"])
    one, other = (Inputs((torch.zeros(2), when), {}, ("img", "when"), roles) for when in (3, 2))
    assert one.signature == other.signature
    assert (one.time, one.host_time) == (3, 3)


@pytest.mark.parametrize("times", [(1.0, 0.5), (torch.tensor([1.0]), torch.tensor([0.5])), (999, 3)])
def test_time_does_not_make_calls_unlike(times: tuple[Any, Any]) -> None:
    one, other = (inputs(torch.zeros(1), timestep=time, sigma=time) for time in times)
    assert one.signature == other.signature


def test_objects_that_nobody_knows_are_alike_by_kind() -> None:
    class Processor:
        pass

    assert inputs(processor=Processor()).signature == inputs(processor=Processor()).signature
    assert inputs(processor=Processor()).signature != inputs(processor=object()).signature


# ------------------------------------------------------------------------------------------------ what has changed


def test_sample_and_time_are_not_watched_and_all_else_is_wherever_it_is() -> None:
    given = inputs(
        text(), torch.tensor([1.0]), {"a": [text(), (text(),)]}, [text(), None], {"scale": 1.0},
        guidance=text(), pooled=torch.zeros(0), sigma=text(),
    )  # fmt: skip
    assert {path: is_conditioning for path, _, is_conditioning in given.watched} == {
        "encoder_hidden_states.a.0": True,
        "encoder_hidden_states.a.1.0": True,
        "controlnet_block_samples.0": False,
        "guidance": True,
    }


def test_the_very_same_conditioning_has_not_changed() -> None:
    kept = text()
    before = watch(inputs(torch.zeros(1), 1.0, kept))
    assert changes(inputs(torch.ones(1), 0.5, kept), before) == []


def test_conditioning_made_anew_counts_by_what_is_in_it() -> None:
    before = inputs(encoder_hidden_states=text(1.0, -2.0, 5.0))
    assert distances(inputs(encoder_hidden_states=text(1.0, -2.0, 5.0)), before) == [0.0]
    assert distances(inputs(encoder_hidden_states=text(1.0, -2.0, 5.0001)), before) == [INFINITE], "however little"


def test_conditioning_that_was_overwritten_has_changed_beyond_measure() -> None:
    kept = text()
    given = inputs(encoder_hidden_states=kept)
    before = watch(given)
    kept.mul_(1.0001)
    assert relatives(changes(given, before)) == [INFINITE], "the same tensor with something else in it"
    assert relatives(changes(inputs(encoder_hidden_states=text()), before)) == [INFINITE], "another tensor instead"


def test_what_changes_with_the_sample_counts_by_what_is_in_it_alone() -> None:
    same = text(1.0, 1.0)
    before = inputs(controlnet_block_samples=[same, text(2.0, 2.0)])
    assert distances(inputs(controlnet_block_samples=[same, text(2.0, 3.0)]), before) == pytest.approx([0.0, 0.25])


@pytest.mark.parametrize("numel", [8, 16384, 50000])
def test_a_residual_that_is_overwritten_in_place_has_changed(numel: int) -> None:
    """A pipeline may well keep one buffer for what its ControlNet gives."""
    buffer = torch.ones(numel)
    given = inputs(controlnet_block_samples=[buffer])
    before = watch(given)
    buffer.mul_(3.0)
    assert relatives(changes(given, before)) == pytest.approx([2.0])


def test_of_a_large_tensor_little_is_kept_and_that_shows_a_change_anywhere() -> None:
    large = torch.ones(64, 1000)
    before = watch(inputs(controlnet_block_samples=large))
    (known,) = before.values()
    assert known.some is not None
    assert known.some.untyped_storage().nbytes() <= 4 * 16384
    moved = large.clone()
    moved[40:] += 1.0
    assert relatives(changes(inputs(controlnet_block_samples=moved), before)) == pytest.approx([24 / 64], rel=0.01)
    moved = large.clone()
    moved[:, 1::4] += 1.0
    assert relatives(changes(inputs(controlnet_block_samples=moved), before)) == pytest.approx([1 / 4], rel=0.01)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        (torch.tensor([1, 2, 5]), torch.tensor([1, 2, 7]), 0.25),
        (torch.tensor([True, True]), torch.tensor([True, False]), 0.5),
        (torch.tensor([1 + 1j, 2j]), torch.tensor([1 + 1j, 1j]), 0.25),
        (torch.tensor([1 + 1j, 2j]).conj(), torch.tensor([1 + 1j, 1j]).conj(), 0.25),
        (torch.ones(4).bfloat16(), torch.full((4,), 1.5).bfloat16(), 0.5),
        (torch.ones(4).half(), torch.full((4,), 1.5).half(), 0.5),
        (torch.ones(2, 2).t(), torch.full((2, 2), 1.5).t(), 0.5),
        (torch.tensor(2.0), torch.tensor(3.0), 0.5),
    ],
    ids=["integer", "bool", "complex", "conjugate", "bfloat16", "half", "strided", "scalar"],
)
def test_tensors_of_all_kinds_can_be_compared(one: torch.Tensor, other: torch.Tensor, distance: float) -> None:
    for name, expected in (("encoder_hidden_states", INFINITE), ("controlnet_block_samples", distance)):
        before = watch(inputs(**{name: one}))
        assert relatives(changes(inputs(**{name: other}), before)) == pytest.approx([expected])
        assert relatives(changes(inputs(**{name: one.clone()}), before)) == [0.0]


def test_inference_tensors_are_told_apart_by_what_is_in_them() -> None:
    """torch does not count their changes: the same tensor may hold another prompt."""
    with torch.inference_mode():
        one, other = text(), text(9.0, 9.0, 9.0)
        before = watch(inputs(encoder_hidden_states=one))
        assert relatives(changes(inputs(encoder_hidden_states=one), before)) == [0.0]
        assert relatives(changes(inputs(encoder_hidden_states=other), before)) == [INFINITE]
        one.copy_(other)
        assert relatives(changes(inputs(encoder_hidden_states=one), before)) == [INFINITE]


@pytest.mark.parametrize("name", ["encoder_hidden_states", "controlnet_block_samples"])
@pytest.mark.parametrize("other", [torch.ones(2), torch.ones(5), torch.ones(3, 3)], ids=["fewer", "more", "grid"])
def test_a_tensor_of_another_shape_is_a_change_and_no_error(name: str, other: torch.Tensor) -> None:
    """In a loop of the user's own a branch of the same name may come with a longer prompt in the next run."""
    found = distances(inputs(**{name: other}), inputs(**{name: torch.ones(3)}))
    assert all(distance > 0 for distance in found)


def test_what_is_new_or_gone_is_told_by_the_signature() -> None:
    one, other = inputs(encoder_hidden_states=text()), inputs(encoder_hidden_states=text(), mask=text())
    assert one.signature != other.signature
    assert changes(inputs(), watch(other)) == []


@pytest.mark.parametrize(
    ("change", "size", "expected"), [(0.0, 0.0, 0.0), (0.0, 5.0, 0.0), (1.0, 4.0, 0.25), (1.0, 0.0, INFINITE)]
)
def test_relative_changes(change: float, size: float, expected: float) -> None:
    assert relative(change, size) == expected


# ------------------------------------------------------------------------------------------------ calls made again


def test_a_spare_survives_a_model_that_empties_its_lists() -> None:
    residuals = [text(), text()]
    given = inputs(text(), 1.0, text(), residuals, {"deeper": {"list": [text()]}})
    args, kwargs = given.spare()
    assert inputs(*args, **kwargs).signature == given.signature
    residuals.pop()
    given.args[4]["deeper"]["list"].clear()
    given.args[4].clear()
    assert [len(args[3]), len(args[4]["deeper"]["list"])] == [2, 1]
    assert args[0] is given.args[0], "tensors are not copied"
    assert inputs(kept=residuals).spare()[1]["kept"] == residuals


def test_a_copy_is_nobody_elses() -> None:
    given = inputs(text(), 1.0, text(), [text()])
    copied = given.copied()
    for tensor in given.tensors:
        tensor.zero_()
    assert copied.signature == given.signature
    assert all(torch.equal(tensor, text()) for tensor in copied.tensors)
    assert [len(copied.tensors), copied.device] == [3, torch.device("cpu")]


def test_another_sample_at_another_time_is_all_that_is_other() -> None:
    given = inputs(torch.zeros(2, 3), torch.tensor([1000.0]), text(), [text()], {"scale": 0.5}, sigma=0.7)
    args, kwargs = given.at_another_step(torch.zeros(2, 3))
    assert inputs(*args, **kwargs).signature == given.signature
    assert not torch.equal(args[0], given.args[0])
    assert not torch.equal(args[1], given.args[1])
    assert kwargs["sigma"] != 0.7
    assert not torch.equal(args[3][0], given.args[3][0]), "a ControlNet gives something else for another sample"
    assert torch.equal(args[2], given.args[2])
    assert args[4] == given.args[4]
    assert torch.equal(given.args[0], torch.zeros(2, 3)), "what was given is as it was"
    args, kwargs = given.at_another_step(torch.zeros(2, 3), with_time=False)
    assert not torch.equal(args[0], given.args[0])
    assert torch.equal(args[1], given.args[1])
    assert kwargs == {"sigma": 0.7}


def test_where_no_argument_is_known_to_be_the_sample_it_is_what_the_output_looks_like() -> None:
    picture, words = torch.zeros(2, 3), torch.zeros(4)
    given = Inputs((picture, words), {}, ("picture", "words"), Roles())
    (moved, same), _ = given.at_another_step(torch.ones(2, 3))
    assert moved.any()
    assert not same.any()
    (one, other), _ = given.at_another_step(torch.ones(7))
    assert one.any()
    assert other.any(), "where nothing looks like it, anything may be it"


@pytest.mark.parametrize("sample", [[torch.zeros(2)], (torch.zeros(2), torch.zeros(3))])
def test_a_sample_that_is_a_list_is_moved_too(sample: Any) -> None:
    (other,), _ = inputs(sample).at_another_step(None)
    assert [tensor.shape for tensor in other] == [tensor.shape for tensor in sample]
    assert all(tensor.abs().sum() > 0 for tensor in other)


@pytest.mark.parametrize("time", [999, 1, 0, 0.5, 1.0, 0.0])
def test_another_time_is_another_and_a_possible_one(time: float) -> None:
    _, other = inputs(timestep=time).at_another_step(None)
    _, tensor = inputs(timestep=torch.tensor([time])).at_another_step(None)
    assert type(other["timestep"]) is type(time)
    assert other["timestep"] != time
    assert 0 <= other["timestep"] <= 1000
    assert tensor["timestep"].dtype == torch.tensor([time]).dtype
    assert float(tensor["timestep"]) == pytest.approx(other["timestep"])


# ------------------------------------------------------------------------------------------------ the sample


def test_a_sample_is_that_of_a_call_with_the_very_same_tensor() -> None:
    tensor = text()
    sample = Sample(tensor)
    assert sample.is_that_of(tensor)
    assert not sample.is_that_of(tensor.clone())
    assert not sample.is_that_of(None)
    tensor.add_(1)
    assert not sample.is_that_of(tensor)


def test_a_sample_that_is_written_into_under_inference_mode_is_another() -> None:
    with torch.inference_mode():
        tensor = text()
        sample = Sample(tensor)
        assert sample.is_that_of(tensor)
        tensor.add_(1)
        assert not sample.is_that_of(tensor)


def test_a_sample_is_not_kept_alive() -> None:
    sample = Sample(text())
    assert not sample.is_that_of(text())


def test_the_sample_among_the_inputs() -> None:
    one, other = text(), text()
    assert inputs(one, 1.0, text()).sample is one
    assert inputs([one, other]).sample is one
    assert inputs(encoder_hidden_states=text()).sample is None


def test_some_elements_are_copied_where_they_are_kept() -> None:
    tensor = text()
    shared, own = some(tensor), some(tensor, copy=True)
    tensor.zero_()
    assert not shared.any()
    assert torch.equal(own, text())


# ------------------------------------------------------------------------------------------------ the time


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (inputs(torch.zeros(1), torch.tensor([0.75, 0.5])), 0.75),
        (inputs(torch.zeros(1), timestep=torch.tensor(300)), 300.0),
        (inputs(torch.zeros(1), timestep=torch.tensor([[0.25, 0.5], [0.25, 0.5]])), 0.5),
        (inputs(torch.zeros(1), 0.5), 0.5),
        (inputs(torch.zeros(1), timestep=7), 7.0),
        (inputs(torch.zeros(1), None, sigma=0.3), 0.3),
        (inputs(torch.zeros(1), t=torch.tensor([0.5]).bfloat16()), 0.5),
        (inputs(torch.zeros(1)), None),
        (inputs(torch.zeros(1), [1.0, 0.5]), 1.0),
        (inputs(torch.zeros(1), torch.zeros(1, device="meta")), None),
    ],
    ids=["batch", "scalar", "per token", "float", "int", "sigma", "short", "none", "list", "elsewhere"],
)
def test_the_time_of_a_step(given: Inputs, expected: float | None) -> None:
    assert given.host_time == expected


def test_a_time_on_a_device_is_not_waited_for() -> None:
    time = torch.zeros(1, device="meta")
    given = inputs(torch.zeros(1), time)
    assert given.time is time
    assert given.host_time is None
