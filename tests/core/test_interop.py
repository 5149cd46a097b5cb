"""Marks of other libraries, read from what these libraries really write."""

from __future__ import annotations

from typing import Any

import torch

from samovar.core import interop as others


def test_a_plain_module_has_no_marks() -> None:
    module = torch.nn.Linear(2, 2)
    assert not others.is_compiled(module)
    assert others.accelerate_hook(module) is None
    assert others.accelerate_weights(module) is None
    assert others.diffusers_hooks(module) == {}
    assert others.compute_dtype(module) is None
    assert others.attention_backend(module) is None
    assert others.declared_plans(module) == {}
    assert not others.has_cache_dit(module)
    assert others.repeated_blocks(module) == ()
    assert others.streamed_lists(module) == {}
    assert others.scheduler_step(module) is others.pipeline_steps(module) is None


def test_both_ways_to_compile() -> None:
    module = torch.nn.Linear(2, 2)
    wrapped: Any = torch.compile(module)
    assert others.is_compiled(wrapped)
    assert not others.is_compiled(module)
    module.compile()
    assert others.is_compiled(module)
    assert others.compiled_call(module) is vars(module)[others.COMPILED_CALL]


def test_hooks_of_accelerate_and_diffusers() -> None:
    from accelerate import cpu_offload
    from diffusers.hooks import apply_layerwise_casting

    offloaded = torch.nn.Sequential(torch.nn.Linear(2, 2))
    cpu_offload(offloaded, torch.device("cpu"))
    module = offloaded[0]
    assert others.accelerate_hook(module) is not None
    weights = others.accelerate_weights(module)
    assert weights is not None
    assert weights["weight"].shape == (2, 2)
    assert not others.FORWARD_WRAPPERS.isdisjoint(vars(module))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    apply_layerwise_casting(model, storage_dtype=torch.float16, compute_dtype=torch.float32)
    assert list(others.diffusers_hooks(model[0])) == ["layerwise_casting"]
    assert others.compute_dtype(model[0]) is torch.float32


def test_where_a_scheduler_is() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    assert others.scheduler_step(scheduler) == 0
    scheduler.set_begin_index(2)
    assert others.scheduler_step(scheduler) == 2
    scheduler.step(torch.zeros(1), scheduler.timesteps[2], torch.zeros(1))
    assert others.scheduler_step(scheduler) == 3
