"""What is a model built of, as its own forward shows it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..arch.blocks import Anatomy, find_anatomy
from ..arch.declarations import declaration_for
from ..arch.modules import parameters_of, unwrapped
from ..errors import ModelError
from .kinds import Inputs, run_model, with_kinds
from .watch import Watcher


def probe_anatomy(model: torch.nn.Module, inputs: Inputs, later_inputs: Inputs | None = None) -> Anatomy:
    """A transformer's anatomy, confirmed by running it.

    `inputs` are the keyword arguments of one denoising step, `later_inputs` those of a later one: what
    differs between them is the sample. Without them, streams get no kind.
    """
    model = unwrapped(model)
    anatomy = find_anatomy(model)
    if not anatomy.stacks:
        raise ModelError(
            f"No stack of blocks was found in {anatomy.model_class}: no list of modules that are built "
            "alike and add to what they are given. Declare it: register_declaration(class_name, "
            "BlockDeclaration(stacks=(path, ...)))."
        )
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        watcher = Watcher(model, anatomy)
        with watcher.watching():
            run_model(model, inputs)
        anatomy = watcher.anatomy()
        if later_inputs is not None:
            anatomy = with_kinds(model, anatomy, watcher.returned, inputs, later_inputs)
    return replace(anatomy, leader=_leader(anatomy, declaration_for(model).leader))


def probe_pipeline(pipeline: Any, denoiser: torch.nn.Module, **settings: Any) -> Anatomy:
    """The anatomy of a pipeline's denoiser, from two steps of the pipeline itself, called with `settings`."""
    calls: list[dict[str, Any]] = []
    denoiser = unwrapped(denoiser)
    parameters = parameters_of(denoiser)
    settings = {"prompt": "a samovar", "num_inference_steps": 2, "output_type": "latent"} | settings

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(dict(zip(parameters, args, strict=False)) | kwargs)

    handle = denoiser.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.compiler.set_stance("force_eager"):  # Two steps are not worth a compilation.
            pipeline(**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{type(pipeline).__name__} could not be run with the settings {settings}: {error} Give the settings that "
            f"it needs, or probe its {type(denoiser).__name__} with inputs of your own: probe_anatomy."
        ) from error
    finally:
        handle.remove()
    if len(calls) < 2:
        raise ModelError(
            f"{type(pipeline).__name__} called its {type(denoiser).__name__} {len(calls)} times in two steps; at least "
            "two calls are needed to see what a step changes. Probe it with inputs of your own: probe_anatomy."
        )
    # However many branches there are, the call half-way is the first branch of the second step.
    return probe_anatomy(denoiser, calls[0], calls[len(calls) // 2])


def _leader(anatomy: Anatomy, declared: str | None) -> str:
    """The declared leader if it ran, else the first stack that sees what is denoised."""
    if declared in [stack.path for stack in anatomy.stacks]:
        return declared
    for stack in anatomy.stacks:
        if any(stream.kind in ("image", "joint") for stream in stack.streams):
            return stack.path
    return anatomy.stacks[0].path
