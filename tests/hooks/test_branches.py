"""The branch of a call that the pipeline does not name: by its conditioning, or by time; unknown rather than wrong."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from samovar.hooks import BranchHook, CallContext, HookRegistry, ModelHook, call_context, current_context, role_by_name
from samovar.hooks.roles import leaves_of

STEPS = 8
TEXT, OTHER_TEXT, IDS = torch.ones(1, 5, 3), torch.zeros(1, 5, 3), torch.arange(12.0).reshape(4, 3)


class Calls(ModelHook):
    """Calls of a model with this forward: what each was recognised as, beside what it is part of."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.model = type("Model", (torch.nn.Module,), {"forward": forward})()
        self.hook = BranchHook()
        self.names: list[str | None] = []
        self.owners: list[Any] = []
        HookRegistry.get_or_create(self.model).register_hook("calls", self)
        HookRegistry.get_or_create(self.model).register_hook("branches", self.hook)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.names.append(current_context().branch)
        return args, kwargs

    def __call__(self, owner: Any, *args: Any, **kwargs: Any) -> str | None:
        self.owners.append(owner)
        self.model(*args, **kwargs)
        return self.names[-1]

    def assert_recognised(self, doubtful: int = 0) -> None:
        """Each owner has a name of its own, after so many of its calls; and none is ever taken for another."""
        by_owner: dict[Any, list[str | None]] = {}
        for owner, name in zip(self.owners, self.names, strict=True):
            by_owner.setdefault(owner, []).append(name)
        for owner, names in by_owner.items():
            others = {name for other, theirs in by_owner.items() if other != owner for name in theirs}
            assert not others - {None} & set(names), f"{owner} is mixed with others: {by_owner}"
            assert len(set(names[doubtful:])) == 1, f"{owner} is not one: {names}"
            assert None not in names[doubtful:]

    def roles(self, *paths: str) -> list[str]:
        return [self.hook.roles.of(path) for path in paths]


def steps(count: int = STEPS, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The sample and the time of each step."""
    random = torch.Generator().manual_seed(seed)
    for step in range(count):
        yield torch.randn(1, 6, 4, generator=random), torch.tensor([1 - step / count])


def usual(self: Any, img: Any, timesteps: Any, y: Any) -> Any:
    return img


def unknown(self: Any, foo: Any, bar: Any, baz: Any) -> Any:
    return {"result": foo}


def without(self: Any, *given: Any) -> Any:
    return given[0]


def richer(self: Any, sample: Any, timestep: Any, text: Any, more: Any = None, ids: Any = None) -> Any:
    return sample


FORWARDS = [usual, unknown, without]
PATHS = {usual: ("img", "timesteps", "y"), unknown: ("foo", "bar", "baz"), without: ("given.0", "given.1", "given.2")}

# ------------------------------------------------------------------------------------------------ by conditioning


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("is_remade", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_conditioning_tells_branches_apart_whatever_its_name(
    forward: Callable[..., Any], branches: int, is_remade: bool, mode: Any
) -> None:
    calls = Calls(forward)
    with mode():
        texts = [TEXT.clone(), OTHER_TEXT.clone()][:branches]
        for sample, time in steps():
            for index, text in enumerate(texts):
                calls(index, sample, time, text.clone() if is_remade else text)
    calls.assert_recognised(doubtful=forward is not usual)  # The second step shows what is what.
    assert calls.roles(*PATHS[forward]) == ["sample", "time", "conditioning"]
    assert calls.hook.trouble() is None


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("lead", [0, 3])
def test_two_requests_in_turns(forward: Callable[..., Any], lead: int) -> None:
    """Neither is named, and one may be some steps ahead of the other."""
    calls, one, other = Calls(forward), list(steps(12)), list(steps(12, seed=1))
    for index in range(12 + lead):
        if index < 12:
            calls("one", *one[index], TEXT)
        if index >= lead:
            calls("other", *other[index - lead], OTHER_TEXT)
    calls.assert_recognised(doubtful=forward is not usual)


def test_requests_that_differ_in_a_number_of_unknown_name_are_not_mixed() -> None:
    calls = Calls(richer)
    for (one, time), (other, _) in zip(steps(), steps(seed=1), strict=True):
        calls("one", one, time, TEXT, 8)
        calls("other", other, time, TEXT, 16)
    calls.assert_recognised()


@dataclass
class Given:
    noisy: Any
    when: Any
    text: Any
    hints: list[Any]


def test_arguments_in_an_object_and_containers_that_the_model_fills() -> None:
    def forward(self: Any, given: Given, options: dict[str, Any]) -> Any:
        options["seen"] = given.text.shape
        return {"sample": given.noisy}

    calls = Calls(forward)
    for sample, time in steps():
        for index, text in enumerate((TEXT, OTHER_TEXT)):
            calls(index, Given(sample, time, text.clone(), [IDS]), {})
    calls.assert_recognised(doubtful=1)
    assert calls.roles("given.noisy", "given.when", "given.hints.0") == ["sample", "time", "conditioning"]


def test_what_else_tells_branches_apart() -> None:
    calls = Calls(richer)
    one, tiles = torch.zeros(2), [torch.zeros(2), torch.ones(2)]
    names = [calls(None, 0, 0, one, ids=tile) for _ in range(2) for tile in tiles]
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    assert calls(None, 0, 0, one, 1.0) != calls(None, 0, 0, one, 2.0)
    nested = [calls(None, 0, 0, {"a": texts}) for texts in ([one], [one], [one, one])]
    assert nested[0] == nested[1] != nested[2]
    given = {"text": one, "ids": tiles[0], "sample": 0, "timestep": 0}
    assert calls(None, **given) == calls(None, **dict(reversed(given.items()))) == names[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_cannot_be_compared_are_known_by_identity() -> None:
    calls = Calls(richer)
    for make in (
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ):
        one, other = make(), make()
        assert calls(None, 0, 0, one) == calls(None, 0, 0, one) != calls(None, 0, 0, other)


def test_a_new_tensor_is_never_mistaken_for_an_old_one_and_branches_are_few() -> None:
    calls = Calls(richer)
    # Each tensor is given up at once: its memory would be used again for the next if nobody held it.
    names = [calls(None, 0, 0, {"text": [torch.full((64,), float(i))]}) for i in range(100)]
    assert len(set(names)) == 100
    kept = torch.zeros(3)
    held = weakref.ref(kept)
    first = calls(None, 0, 0, kept)
    kept.add_(1)
    assert calls(None, 0, 0, kept) != first, "changed in place: other conditioning"
    del kept
    HookRegistry.get_or_create(calls.model).reset_hook("branches")
    gc.collect()
    assert held() is None


# ------------------------------------------------------------------------------------------------ names and roles


def test_a_named_branch_and_a_request_come_first_and_errors_leave_no_context() -> None:
    calls = Calls(usual)
    sample, time = next(steps())
    with call_context(branch="cond"):
        assert calls(None, sample, time, TEXT) == "cond"
    found = []
    for request in (1, 2):
        with call_context(request=request):
            found.append(calls(None, sample, time, TEXT))
    assert found[0] != found[1], "equal tensors of two requests"
    with pytest.raises(TypeError):
        calls(None, sample, time)
    assert current_context() == CallContext()


def test_roles_are_learned_of_named_branches_and_outlive_requests() -> None:
    calls = Calls(unknown)
    for request in (1, 2):
        with call_context(request=request, branch="cond"):
            for sample, time in steps():
                assert calls("cond", sample, time, TEXT.clone()) == "cond"
        calls.hook.drop(request)
    assert calls.roles("foo", "bar", "baz") == ["sample", "time", "conditioning"]
    for sample, time in steps(3):
        calls("unnamed", sample, time, TEXT)
    calls.assert_recognised()


def test_residuals_are_known_by_name_or_learned_of_a_named_branch() -> None:
    def controlled(self: Any, sample: Any, timestep: Any, text: Any, controlnet_block_samples: Any) -> Any:
        return sample

    for forward, name in ((controlled, None), (richer, "cond")):
        calls = Calls(forward)
        with call_context(branch=name):
            for sample, time in steps():
                calls("cond", sample, time, TEXT, [sample[:, :2] * 2, sample + 1])
        calls.assert_recognised()
        more = PATHS.get(forward, ("controlnet_block_samples" if forward is controlled else "more",))[0]
        assert calls.roles(f"{more}.0", f"{more}.1", "text") == ["residual", "residual", "conditioning"]


def test_hints_and_paths() -> None:
    roles = {
        "img": "sample", "noisy_image": "sample", "timesteps": "time", "sigma_t": "time", "given.timestep": "time",
        "mid_block_additional_residual": "residual", "added.time_ids": "conditioning", "video_coords": "conditioning",
        "encoder_hidden_states": "conditioning", "image_embeds": "conditioning",
    }  # fmt: skip
    assert {path: role_by_name(path) for path in roles} == roles
    leaves = leaves_of(("a", "*rest"), (1, 2, [3, {"x": None}]), {"b": (4,)})
    assert leaves == {"a": 1, "rest.0": 2, "rest.1.0": 3, "rest.1.1.x": None, "b.0": 4}
    assert list(leaves_of(("x", "text"), (), {"a": 4, "b": 3, "text": 2, "x": 1})) == ["x", "text", "a", "b"]


# ------------------------------------------------------------------------------------------------ by time alone


def alone(self: Any, x: Any, t: Any, return_dict: bool = True) -> Any:
    return x


def alone_with_unknown_names(self: Any, foo: Any, bar: Any) -> Any:
    return foo


@pytest.mark.parametrize("forward", [alone, alone_with_unknown_names])
@pytest.mark.parametrize("make", [torch.Tensor.clone, torch.Tensor.item], ids=["tensors", "numbers"])
def test_a_model_of_sample_and_time_is_one_request_as_long_as_time_runs_one_way(forward: Any, make: Any) -> None:
    calls = Calls(forward)
    for run, count in enumerate((STEPS, 3, STEPS)):  # The second is given up.
        for sample, time in list(steps(seed=run))[:count]:
            calls(run, sample, make(time))
    calls.assert_recognised(doubtful=forward is not alone)
    assert calls.hook.trouble() is None


def test_samples_in_turns_at_one_time_are_unknown() -> None:
    for forward, more in ((alone, ()), (richer, (TEXT,))):
        calls = Calls(forward)
        for (one, time), (other, _) in zip(steps(), steps(seed=1), strict=True):
            for sample in (one, other):
                calls(None, sample, time, *more)
        assert set(calls.names[4:]) == {None}
        assert "its calls differ in nothing but the sample and the time" in (calls.hook.trouble() or "")


# ------------------------------------------------------------------------------------------------ trouble


def test_a_model_of_a_sample_alone_has_no_branch_and_says_so() -> None:
    calls = Calls(lambda self, x, return_dict=True: x)
    for sample, _ in steps():
        calls(None, sample, return_dict=False)
    assert set(calls.names) == {None}
    assert "all of its arguments change at every step" in (calls.hook.trouble() or "")


def test_where_every_step_looks_new_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(usual)
    with caplog.at_level(logging.WARNING):
        for index, (sample, time) in enumerate(steps()):
            calls(index, sample, time, TEXT + index)
            assert (calls.hook.trouble() is None) is (index < 4)
    calls.assert_recognised()
    (record,) = caplog.records
    assert record.message == calls.hook.trouble()
    assert "because there are new values at each call (y)" in record.message
    assert "call_context(branch=" in record.message
