"""Roles of arguments and branches of calls, by values over calls: names and identity may mislead."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from samovar.hooks import BranchHook, HookRegistry, ModelHook, Roles, call_context, current_context
from samovar.hooks.roles import Snapshot, leaves_of, role_by_name

STEPS = 8
Forward = Callable[..., Any]


class Names(ModelHook):
    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen.append(current_context().branch)
        return args, kwargs


def hooked(forward: Forward) -> tuple[torch.nn.Module, BranchHook, list[str | None]]:
    """A model with this forward; the names of branches come as it is called."""
    model = type("Model", (torch.nn.Module,), {"forward": forward})()
    names, hook = Names(), BranchHook()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("names", names)
    registry.register_hook("branches", hook)
    return model, hook, names.seen


def steps(count: int = STEPS, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sample and the time of each step."""
    random = torch.Generator().manual_seed(seed)
    for step in range(count):
        yield torch.randn(1, 6, 4, generator=random), torch.tensor([1 - step / count])


TEXT, OTHER_TEXT, IDS = torch.ones(1, 5, 3), torch.zeros(1, 5, 3), torch.arange(12.0).reshape(4, 3)


def assert_in_turns(names: list[str | None], branches: int, doubtful: int = 0) -> None:
    """Whether the same branches come in the same order at each step; so many steps before may be unknown."""
    first, names = names[:branches], names[branches * (1 + doubtful) :]
    assert None not in names
    assert len(set(first)) == branches
    assert names == first * (len(names) // branches)


# ------------------------------------------------------------------------------------------------ names are hints


def of_usual_names(self: Any, img: Any, timesteps: Any, y: Any) -> Any:
    return img


def of_unknown_names(self: Any, foo: Any, bar: Any, baz: Any) -> Any:
    return foo


def of_no_names(self: Any, *given: Any) -> Any:
    return given[0]


def of_misleading_names(self: Any, encoder_states: Any, x: Any, sigmas: Any) -> Any:
    return encoder_states


@pytest.mark.parametrize("forward", [of_usual_names, of_unknown_names, of_no_names])
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("is_remade", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_any_names(forward: Forward, branches: int, is_remade: bool, mode: Any) -> None:
    model, hook, names = hooked(forward)
    with mode():
        texts = [TEXT.clone(), OTHER_TEXT.clone()][:branches]
        for sample, time in steps():
            for text in texts:
                model(sample, time, text.clone() if is_remade else text)
    assert_in_turns(names, branches)
    assert hook.trouble() is None
    paths = [f"given.{i}" for i in range(3)] if forward is of_no_names else leaves_of_names(forward)
    assert [hook.roles.of(path) for path in paths] == ["sample", "time", "conditioning"]


def leaves_of_names(forward: Forward) -> list[str]:
    return list(forward.__code__.co_varnames[1:4])


@pytest.mark.parametrize("is_numbered", [False, True])
def test_numbers_as_time(is_numbered: bool) -> None:
    for forward in (of_usual_names, of_unknown_names):
        model, hook, names = hooked(forward)
        for index, (sample, time) in enumerate(steps()):
            model(sample, index if is_numbered else time.item(), TEXT)
        assert_in_turns(names, 1)
        assert hook.roles.of(leaves_of_names(forward)[1]) == "time"


@pytest.mark.parametrize("make", [int, torch.tensor])
@pytest.mark.parametrize("forward", [of_usual_names, of_unknown_names])
def test_class_labels_in_turns(make: Any, forward: Forward) -> None:
    model, _, names = hooked(forward)
    for sample, time in steps():
        for label in (3, 1000):
            model(sample, time, make(label))
    assert_in_turns(names[2:], 2)  # Of a number alone, the first call cannot say what it is.


def test_a_sample_by_name_that_never_changes_is_conditioning() -> None:
    def forward(self: Any, img: Any, t: Any, x: Any) -> Any:
        return img

    model, hook, names = hooked(forward)
    for sample, time in steps():
        for text in (TEXT, OTHER_TEXT):
            model(sample, time, text)
    assert_in_turns(names[2:], 2)
    assert [hook.roles.of(path) for path in ("img", "t", "x")] == ["sample", "time", "conditioning"]
    model, hook, names = hooked(forward)
    for sample, time in steps():
        model(sample, time, TEXT)
    assert_in_turns(names[3:], 1)
    assert hook.roles.of("x") == "conditioning"


def test_a_time_by_name_that_never_changes_is_conditioning() -> None:
    def forward(self: Any, sample: Any, timestep: Any, timestep_cond: Any, text: Any) -> Any:
        return sample

    model, hook, names = hooked(forward)
    for sample, time in steps():
        model(sample, time, torch.ones(1, 8), TEXT)
    assert_in_turns(names, 1)
    assert hook.roles.of("timestep_cond") == "conditioning"


@dataclasses.dataclass
class Given:
    noisy: Any
    when: Any
    text: Any
    hints: list[Any]


def test_arguments_in_an_object() -> None:
    def forward(self: Any, given: Given) -> Any:
        return {"sample": given.noisy}

    model, hook, names = hooked(forward)
    for sample, time in steps():
        for text in (TEXT, OTHER_TEXT):
            model(Given(sample, time, text.clone(), [IDS]))
    assert_in_turns(names, 2)
    roles = {name: hook.roles.of(f"given.{name}") for name in ("noisy", "when", "text", "hints.0")}
    assert roles == {"noisy": "sample", "when": "time", "text": "conditioning", "hints.0": "conditioning"}


# ------------------------------------------------------------------------------------------------ what changes


def with_more(self: Any, sample: Any, timestep: Any, text: Any, more: Any, ids: Any = None) -> Any:
    return sample


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("is_own", [False, True])
def test_residuals_under_any_name(branches: int, is_own: bool) -> None:
    model, hook, names = hooked(with_more)
    for sample, time in steps():
        shared = [sample[:, :2] * 2, sample.mean((1, 2)), sample + 1]
        for index, text in enumerate([TEXT, OTHER_TEXT][:branches]):
            model(sample, time, text, [part + index * is_own for part in shared])
    assert_in_turns(names, branches, doubtful=1)
    assert {hook.roles.of(f"more.{i}") for i in (0, 2)} == {"residual"}
    assert hook.roles.of("text") == "conditioning"


def test_a_second_branch_that_differs_in_what_is_remade_is_found_late_too() -> None:
    model, _, names = hooked(with_more)
    for index, (sample, time) in enumerate(steps(16)):
        model(sample, time, TEXT, torch.full((1,), 3.5), IDS)
        if index >= 8:
            model(sample, time, TEXT, torch.full((1,), 1.0), IDS)
    assert len(set(names[:9])) == 1
    assert_in_turns(names[8:], 2)


def test_conditioning_that_is_replaced() -> None:
    for name, count in ((None, 2), ("cond", 1)):
        model, hook, names = hooked(with_more)
        with call_context(branch=name):
            for index, (sample, time) in enumerate(steps(12)):
                model(sample, time, TEXT if index < 6 else OTHER_TEXT, None, IDS)
        assert len(set(names)) == count
        assert len(set(names[:6])) == len(set(names[6:])) == 1
        assert hook.roles.of("text") == "conditioning"


def test_roles_are_learned_of_named_branches_and_outlive_runs() -> None:
    model, hook, names = hooked(of_unknown_names)
    for request in (1, 2):
        with call_context(request=request, branch="cond"):
            for sample, time in steps():
                model(sample, time, TEXT.clone())
        hook.drop(request)
    assert set(names) == {"cond"}
    assert [hook.roles.of(path) for path in ("foo", "bar", "baz")] == ["sample", "time", "conditioning"]
    for sample, time in steps(3):
        model(sample, time, TEXT)
    assert_in_turns(names[-3:], 1)


@pytest.mark.parametrize("forward", [of_usual_names, of_unknown_names])
@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize("is_remade", [False, True])
def test_two_requests_in_turns(forward: Forward, lead: int, is_remade: bool) -> None:
    """Neither is named; one may be some steps ahead of the other."""
    model, _, names = hooked(forward)
    one, other = list(steps(12)), list(steps(12, seed=1))
    texts = {id(one): TEXT, id(other): OTHER_TEXT}
    owners = []
    for index in range(12 + lead):
        for request, at in ((one, index), (other, index - lead)):
            if 0 <= at < 12:
                text = texts[id(request)]
                owners.append(request is one)
                model(*request[at], text.clone() if is_remade else text)
    ones = {name for name, is_one in zip(names, owners, strict=True) if is_one} - {None}
    others = {name for name, is_one in zip(names, owners, strict=True) if not is_one} - {None}
    assert not ones & others
    assert (len(ones), len(others)) == (1, 1)


def test_tiles_that_nothing_tells_apart_are_not_mixed() -> None:
    model, hook, names = hooked(with_more)
    for (one, time), (other, _) in zip(steps(), steps(seed=1), strict=True):
        for tile in (one, other):
            model(tile, time, TEXT, None)
    assert set(names[4:]) == {None}
    assert hook.trouble() is not None


# ------------------------------------------------------------------------------------------------ trouble, memory


def test_where_every_step_looks_new_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, hook, names = hooked(of_usual_names)
    with caplog.at_level(logging.WARNING):
        for index, (sample, time) in enumerate(steps()):
            model(sample, time, TEXT + index)
            assert (hook.trouble() is None) is (index < 4)
    assert len(set(names)) == STEPS
    (record,) = caplog.records
    assert record.message == hook.trouble()
    assert "because there are new values at each call (y)" in record.message
    assert "call_context(branch=" in record.message


# ------------------------------------------------------------------------------------------------ sample and time alone


def alone(self: Any, x: Any, t: Any, return_dict: bool = True) -> Any:
    return x


def alone_with_unknown_names(self: Any, foo: Any, bar: Any) -> Any:
    return foo


@pytest.mark.parametrize("forward", [alone, alone_with_unknown_names])
@pytest.mark.parametrize("make", [torch.Tensor.clone, torch.Tensor.item], ids=["tensors", "numbers"])
def test_a_model_of_sample_and_time_is_one_request_as_long_as_time_runs_one_way(forward: Forward, make: Any) -> None:
    model, hook, names = hooked(forward)
    for seed in range(3):
        for sample, time in steps(seed=seed):
            model(sample, make(time))
    found = [names[run * STEPS : (run + 1) * STEPS] for run in range(3)]
    assert [len(set(of_run)) for of_run in found] == [1, 1, 1]
    assert len(set(names)) == 3
    assert None not in names
    assert hook.trouble() is None


def test_samples_in_turns_at_one_time_are_no_request() -> None:
    model, hook, names = hooked(alone)
    for (one, time), (other, _) in zip(steps(), steps(seed=1), strict=True):
        for sample in (one, other):
            model(sample, time)
    assert set(names[4:]) == {None}
    assert "its calls differ in nothing but the sample and the time" in (hook.trouble() or "")


def test_a_run_that_was_given_up_is_not_gone_on_with() -> None:
    model, _, names = hooked(alone)
    for count in (3, STEPS):
        for sample, time in list(steps(seed=count))[:count]:
            model(sample, time)
    assert [len(set(names[:3])), len(set(names[3:])), len(set(names))] == [1, 1, 2]


def test_a_model_of_a_sample_alone_has_no_branch_and_says_so() -> None:
    def forward(self: Any, x: Any, return_dict: bool = True) -> Any:
        return x

    model, hook, names = hooked(forward)
    for sample, _ in steps():
        model(sample, return_dict=False)
    assert set(names) == {None}
    assert "all of its arguments change at every step" in (hook.trouble() or "")


@pytest.mark.parametrize("are_joined", [True, False])
def test_what_remains_when_guidance_ends_is_recognised(are_joined: bool) -> None:
    model, hook, names = hooked(of_usual_names)
    both = torch.cat([OTHER_TEXT, TEXT])
    for index, (sample, time) in enumerate(steps(16)):
        if index < 8 and are_joined:
            model(torch.cat([sample, sample]), time.expand(2), both)
        elif index < 8:
            model(sample, time, OTHER_TEXT)
        if index >= 8 or not are_joined:
            model(sample, time, TEXT)
    assert None not in names
    assert len(set(names[-8:])) == 1
    assert are_joined or names[-1] == names[1], "the branch that it was before"
    assert hook.trouble() is None


def test_snapshots() -> None:
    tensor = torch.arange(3.0)
    for hold, copy in ((True, False), (False, True), (True, True)):
        snapshot = Snapshot(tensor, hold=hold, copy=copy)
        assert snapshot.equals(tensor.clone())
        assert not snapshot.equals(tensor + 1)
        assert not snapshot.equals(tensor.double())
        assert not snapshot.equals(None)
    snapshot = Snapshot(tensor, hold=True, copy=True)
    assert snapshot.is_surely_same(tensor)
    tensor.add_(1)
    assert not snapshot.is_surely_same(tensor)
    assert not snapshot.equals(tensor)
    assert snapshot.equals(torch.arange(3.0))
    assert Snapshot(3, hold=False, copy=False).equals(3)
    assert not Snapshot(3, hold=False, copy=False).equals(4)


def test_hints_and_paths() -> None:
    names = {
        "img": "sample", "noisy_image": "sample", "timesteps": "time", "sigma_t": "time", "given.timestep": "time",
        "mid_block_additional_residual": "residual", "added.time_ids": "conditioning", "prompt_embeds.x": "conditioning"
    }  # fmt: skip
    assert {path: role_by_name(path) for path in names} == names
    leaves = leaves_of(("a", "*rest"), (1, 2, [3, {"x": None}]), {"b": (4,)})
    assert leaves == {"a": 1, "rest.0": 2, "rest.1.0": 3, "rest.1.1.x": None, "b.0": 4}
    assert Roles().of("anything.else") == "conditioning"
