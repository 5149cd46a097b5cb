"""Where would a model's weights be with a given amount of GPU memory? `samovar plan`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .inspect import find_config
from .options import add_command, model_of
from .terminal import Status


def add_plan(commands: Any) -> None:
    plan = add_command(
        commands,
        "plan",
        _plan,
        help="show which weights stay on the GPU with how much memory",
        description="Show which parts of a model would stay on the GPU, take turns or stream, and the peak memory and "
        "traffic to expect. No weights are loaded. A budget that is too small is refused with the smallest that works.",
        examples="  samovar plan FluxTransformer2DModel --gpu-memory 12GiB\n"
        "  samovar plan ./my-model --mode layerwise --json",
        model="a built-in model, a folder in diffusers format, a hub name, or a class",
    )
    plan.add_argument("--gpu-memory", metavar="SIZE", help="the budget, such as 12GiB")
    plan.add_argument("--mode", default="auto", help="auto, model (take turns) or layerwise (stream) (auto)")
    plan.add_argument("--activations", metavar="SIZE", help="memory that a component needs besides its weights")
    plan.add_argument("--json", action="store_true", help="print JSON for programs")


def _plan(options: argparse.Namespace) -> int:
    with Status("reading the model"):
        from ..offload import OffloadConfig, plan_offload, read_sizes

        config = OffloadConfig(options.mode, gpu_memory=options.gpu_memory, activations=options.activations)
        plan = plan_offload(read_sizes(find_config(model_of(options))), config)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0
