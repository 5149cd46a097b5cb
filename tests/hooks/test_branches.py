"""Branches without names: told apart by everything but the sample and the time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from test_context import Watch, flux

from samovar.hooks import BranchHook, CallContext, HookRegistry, call_context, current_context, role_by_name
from samovar.hooks.roles import leaves_of


def test_what_counts_as_conditioning() -> None:
    yes = ("encoder_hidden_states", "pooled_projections", "cap_feats", "prompt_embeds", "image_embeds", "video_coords")
    no = ("hidden_states", "timestep", "controlnet_block_samples", "x", "sigma")
    assert {role_by_name(name) for name in yes} == {"conditioning"}
    assert "conditioning" not in {role_by_name(name) for name in no}


def test_conditioning_tensors_tell_branches_apart() -> None:
    model, inputs = flux()
    watch, branches = Watch(), BranchHook()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("watch", watch)
    registry.register_hook("branches", branches)
    others = [
        inputs | {"encoder_hidden_states": torch.randn(1, n, 12), "txt_ids": torch.zeros(n, 3)} for n in (6, 6, 4)
    ]
    with torch.no_grad():
        for _ in range(3):
            for conditioning in (inputs, *others):
                model(**conditioning | {"hidden_states": torch.randn_like(inputs["hidden_states"])})
    names = [context.branch for context in watch.seen]
    assert len(set(names)) == 4
    assert None not in names
    assert names == names[:4] * 3, "the same branch at every step, however the sample changes"


def test_a_named_branch_and_a_request_come_first() -> None:
    model, inputs = flux()
    watch = Watch()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("watch", watch)
    registry.register_hook("branches", BranchHook())
    with torch.no_grad():
        with model.cache_context("cond"):
            model(**inputs)
        for request in (1, 2):
            with call_context(request=request):
                model(**inputs)
    assert watch.seen[0] == CallContext(None, "cond")
    assert watch.seen[1].branch != watch.seen[2].branch, "equal tensors of two requests are two call sequences"
    assert current_context() == CallContext()


def test_leaves_are_those_of_the_running_call() -> None:
    """Another hook may have put something else in the place of an argument."""
    model, inputs = flux()
    branches, found = BranchHook(), list[Any]()

    class Looks(Watch):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            other = kwargs | {"hidden_states": kwargs["hidden_states"] * 2}
            less = {name: value for name, value in kwargs.items() if name != "guidance"}
            found.extend(branches.leaves(args, given) for given in (kwargs, other, less))
            return args, kwargs

    registry = HookRegistry.get_or_create(model)
    registry.register_hook("looks", Looks())
    registry.register_hook("branches", branches)
    with torch.no_grad():
        model(**inputs)
    assert found[0] is not None
    assert found[0]["hidden_states"] is inputs["hidden_states"]
    assert found[1:] == [None, None]
    assert branches.leaves((), inputs) is None


def test_where_nothing_tells_the_branch_is_unknown_and_errors_leave_no_context() -> None:
    class Unconditional(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> CallContext:
            if hidden_states is None:
                raise ValueError("nothing to denoise")
            return current_context()

    model = Unconditional()
    HookRegistry.get_or_create(model).register_hook("branches", BranchHook())
    assert model(torch.zeros(1)).branch is None
    with pytest.raises(ValueError, match="nothing to denoise"):
        model(None)
    assert current_context() == CallContext()


def test_a_new_tensor_is_never_mistaken_for_an_old_one_and_branches_are_few() -> None:
    class Plain(torch.nn.Module):
        def forward(self, hidden_states: int, encoder_hidden_states: Any) -> str | None:
            return current_context().branch

    model, hook = Plain(), BranchHook()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("branches", hook)
    # Each tensor is given up at once: its memory would be used again for the next if nobody held it.
    names = [model(0, {"text": [torch.full((64,), float(i))]}) for i in range(100)]
    assert len(set(names)) == 100
    kept = torch.zeros(3)
    held = weakref.ref(kept)
    first = model(0, kept)
    kept.add_(1)
    assert model(0, kept) != first, "changed in place: other conditioning"
    del kept
    registry.reset_hook("branches")
    gc.collect()
    assert held() is None


class Denoiser(torch.nn.Module):
    def forward(
        self, hidden_states: Any, encoder_hidden_states: Any, video_coords: Any = None, scale: Any = 1.0
    ) -> Any:
        return current_context().branch


def test_tiles_with_one_text_are_call_sequences_of_their_own() -> None:
    model, text = Denoiser(), torch.zeros(2)
    HookRegistry.get_or_create(model).register_hook("branches", BranchHook())
    tiles = [torch.zeros(2), torch.ones(2)]
    names = [model(0, text, video_coords=tile) for _ in range(2) for tile in tiles]
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    assert model(0, text, scale=1.0) != model(0, text, scale=2.0)
    assert model(0, {"a": [text]}) == model(0, {"a": [text]}) != model(0, {"a": [text, text]})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_inference_mode_and_odd_tensors() -> None:
    model = Denoiser()
    HookRegistry.get_or_create(model).register_hook("branches", BranchHook())
    with torch.inference_mode():
        one, other = torch.zeros(2), torch.ones(2)
        assert model(0, one) == model(0, one) != model(0, other)
    makers = [  # Not comparable.
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(2, 2).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ]
    for make in makers:
        one, other = make(), make()
        assert model(0, one) == model(0, one) != model(0, other)


def test_the_order_of_keywords_means_nothing() -> None:
    model, text, coords = Denoiser(), torch.zeros(2), torch.zeros(2)
    HookRegistry.get_or_create(model).register_hook("branches", BranchHook())
    given = {"encoder_hidden_states": text, "video_coords": coords, "hidden_states": 0}
    names = {model(**given), model(**dict(reversed(given.items()))), model(0, text, coords)}
    assert len(names) == 1
    parameters = ("x", "text", "rest")
    one = list(leaves_of(parameters, (1,), {"text": 2, "b": 3, "a": 4}))
    assert one == list(leaves_of(parameters, (), {"a": 4, "b": 3, "text": 2, "x": 1})) == ["x", "text", "a", "b"]
