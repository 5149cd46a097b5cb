"""The probing forward: from inputs, from a pipeline, and with what it must survive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.arch import probe_anatomy, probe_pipeline
from samovar.errors import ModelError
from samovar.hooks import HookRegistry, ModelHook


def case(name: str) -> zoo.Case:
    return next(case for case in zoo.load() if case.id == name)


def test_without_later_inputs_streams_have_no_kind() -> None:
    flux = case("FluxTransformer2DModel")
    anatomy = probe_anatomy(flux.build(), flux.inputs(0))
    assert all(stream.kind is None and stream.parameter for stack in anatomy.stacks for stream in stack.streams)
    assert anatomy.leader == "transformer_blocks"


def test_a_pipeline_is_probed_by_two_steps_of_its_own() -> None:
    pipe = tiny_flux_pipeline()
    anatomy = probe_pipeline(pipe, pipe.transformer, height=16, width=16)
    kinds = {stack.path: [stream.kind for stream in stack.streams] for stack in anatomy.stacks}
    assert kinds == {"transformer_blocks": ["text", "image"], "single_transformer_blocks": ["text", "image"]}
    assert not pipe.transformer._forward_pre_hooks


def test_a_pipeline_that_does_not_call_the_denoiser_is_refused() -> None:
    def pipeline(**settings: Any) -> None:
        return None

    with pytest.raises(ModelError, match="called its Linear 0 times in two steps"):
        probe_pipeline(pipeline, torch.nn.Linear(2, 2))


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    flux = case("FluxTransformer2DModel")
    model = flux.build()
    with pytest.raises(RuntimeError):
        probe_anatomy(model, flux.inputs(0) | {"hidden_states": torch.zeros(1, 20, 99)})
    later = flux.inputs(1)
    broken = model.single_transformer_blocks[0]
    own_forward = broken.forward
    broken.forward = None  # What a library left in its place, to be kept as it is.
    with pytest.raises(TypeError):
        probe_anatomy(model, flux.inputs(0), later)
    assert vars(broken)["forward"] is None
    broken.forward = own_forward
    assert len(probe_anatomy(model, flux.inputs(0), later).stacks) == 2


def test_a_hooked_model_is_probed_like_a_bare_one() -> None:
    flux = case("FluxTransformer2DModel")
    model = flux.build()
    plain = probe_anatomy(model, flux.inputs(0), flux.inputs(1))
    for module in (model, *model.transformer_blocks):
        HookRegistry.get_or_create(module).register_hook("nothing", ModelHook())
    assert probe_anatomy(model, flux.inputs(0), flux.inputs(1)) == plain


def test_a_stack_that_does_not_run_is_named() -> None:
    flux = case("FluxTransformer2DModel")
    model = flux.build()
    model.spare_blocks = copy.deepcopy(model.transformer_blocks)
    anatomy = probe_anatomy(model, flux.inputs(0))
    assert anatomy.idle == ("spare_blocks",)
    assert "spare_blocks" not in [stack.path for stack in anatomy.stacks]


def test_a_declared_leader_is_kept() -> None:
    for name in ("ZImageTransformer2DModel", "Lumina2Transformer2DModel"):
        model = case(name)
        assert probe_anatomy(model.build(), model.inputs(0), model.inputs(1)).leader == "layers"
