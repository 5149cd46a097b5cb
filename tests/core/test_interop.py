"""Marks of other libraries, read from what these libraries really write."""

from __future__ import annotations

import torch

from samovar.core import interop as others


def test_where_a_scheduler_is() -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    assert others.scheduler_step(scheduler) == 0
    scheduler.set_begin_index(2)
    assert others.scheduler_step(scheduler) == 2
    scheduler.step(torch.zeros(1), scheduler.timesteps[2], torch.zeros(1))
    assert others.scheduler_step(scheduler) == 3
