"""Where would a model's weights live within some GPU memory? `samovar plan`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..builtin import BUILTIN_MODELS
from .terminal import Status


def add_plan(commands: Any) -> None:
    """Make the command known."""
    plan = commands.add_parser(
        "plan",
        help="show what of a model stays on the GPU, within how much memory",
        description="Show which parts of a model would stay on the GPU, take turns or stream, and the peak and "
        "traffic to expect. No weights are loaded. What cannot fit is refused with the least that can.",
        epilog="examples:\n  samovar plan FluxTransformer2DModel --gpu-memory 12GiB\n"
        "  samovar plan ./my-model --mode layerwise --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    plan.add_argument(
        "model", metavar="MODEL_OR_CLASS", help="a built-in model, a folder in diffusers format, or a class"
    )
    plan.add_argument("--gpu-memory", metavar="SIZE", help="what may be used, such as 12GiB")
    plan.add_argument("--mode", default="auto", help="auto, model (take turns) or layerwise (stream) (auto)")
    plan.add_argument("--activations", metavar="SIZE", help="what a component needs beside its weights")
    plan.add_argument("--json", action="store_true", help="print JSON for programs")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    with Status("reading the model"):
        from ..offload import OffloadConfig, plan_offload, read_sizes

        config = OffloadConfig(options.mode, gpu_memory=options.gpu_memory, activations=options.activations)
        plan = plan_offload(read_sizes(str(BUILTIN_MODELS.get(options.model.lower(), options.model))), config)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
    return 0
