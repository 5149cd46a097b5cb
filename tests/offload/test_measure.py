"""What a warm-up run teaches: needs by component, whichever entry point it is called by, and the time of each block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline
from samovar.hooks import HookRegistry, ModelHook, running
from samovar.offload import HostStage, OffloadConfig, apply_offload
from samovar.offload.sizes import find_components

from .holding import CASES, Holder, blocks_of, layerwise


class Work(ModelHook):
    """Takes a second of the device's clock, and some of its memory."""

    def __init__(self, stage: HostStage, num_bytes: int) -> None:
        self._stage, self._num_bytes = stage, num_bytes

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        buffer = self._stage.allocate(self._num_bytes)
        self._stage.timeline.compute(1.0)
        self._stage.free(buffer)
        return args, kwargs


def test_blocks_are_timed_where_they_compute_and_needs_are_beside_the_weights() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)
    offloaded = layerwise(holder)
    stage = offloaded.stage
    assert isinstance(stage, HostStage)
    blocks = blocks_of(model)
    for block in blocks.values():
        # Sorted after the meter's by name, so that it is inside.
        HookRegistry.get_or_create(block).register_hook("work", Work(stage, 1000))
    with offloaded.measure() as measured, running(holder):
        for step in range(3):
            case.run(model, step)
    assert measured.activations == {"transformer": 1000}
    assert measured.timing.block_s == pytest.approx({f"transformer.{path}": 1.0 for path in blocks})
    assert measured.timing.bus_bytes_s == stage.timeline.bus_bytes_s
    for block in blocks.values():
        HookRegistry.get_or_create(block).remove_hook("work")
    plan = offloaded.replan(gpu_memory=10**9, activations=measured.activations, timing=measured.timing)
    assert plan.component("transformer").resident_s == pytest.approx(len(blocks))
    offloaded.detach()
    assert "_samovar_hooks" not in vars(model.transformer_blocks[0])


def test_a_component_that_is_called_by_another_entry_point_has_its_own_slice() -> None:
    pipe = tiny_flux_pipeline()
    stage = HostStage()
    offloaded = apply_offload(pipe, OffloadConfig("model"), stage=stage)
    HookRegistry.get_or_create(pipe.vae.decoder.conv_in).register_hook("work", Work(stage, 5000))
    with offloaded.measure() as measured:
        pipe("a cat", num_inference_steps=1, height=16, width=16, max_sequence_length=8, output_type="pt")
    HookRegistry.get_or_create(pipe.vae.decoder.conv_in).remove_hook("work")
    assert measured.activations == {"text_encoder": 0, "text_encoder_2": 0, "transformer": 0, "vae": 5000}
    offloaded.detach()
    assert all(
        "_samovar_hooks" not in vars(module)
        for component in find_components(pipe)
        for module in component.module.modules()
    )
