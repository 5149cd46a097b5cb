"""A model's anatomy, as its own forward shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..arch.blocks import Anatomy, find_anatomy
from ..arch.modules import unwrapped
from ..core import nested
from ..core.errors import ModelError
from ..hooks import role_by_name
from .forward import Watcher
from .gates import Gates
from .skip_pass import rehearse

Inputs = Mapping[str, Any]
"""The keyword arguments of one forward of the model."""


def probe_anatomy(model: torch.nn.Module, inputs: Inputs, later_inputs: Inputs | None = None) -> Anatomy:
    """A transformer's anatomy, confirmed by running it.

    `inputs` are the keyword arguments of one denoising step, `later_inputs` those of a later one: what differs between
    them is the sample. With both, a step is skipped for a trial, which shows the stack by whose input steps are judged;
    ModelError says why no step can be skipped.
    """
    model = unwrapped(model)
    anatomy = find_anatomy(model)
    if not anatomy.stacks:
        raise ModelError(
            f"No stack of blocks was found in {anatomy.model_class}: no list of modules that are built alike and add "
            "to their input. Declare it: register_declaration(class_name, BlockDeclaration(stacks=(path, ...)))."
        )
    watcher = Watcher(model, anatomy)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), Gates(model, anatomy, "probe") as gates:
        with gates.asking(watcher):  # Some models empty the lists that they are given.
            output = model(**nested.map_tensors(lambda tensor: tensor, dict(inputs)))
        leader, anatomy = anatomy.leader, watcher.anatomy()
        if later_inputs is not None:
            watched = watcher.watched()
            given = {**later_inputs, **{name: value for name, value in inputs.items() if role_by_name(name) == "time"}}
            rehearse(model, gates.by_module, watched, ((), dict(inputs)), output, lambda with_time: ((), given))
            return replace(anatomy, leader=watched.trace.leader.gate.path)
    paths = [stack.path for stack in anatomy.stacks]
    return replace(anatomy, leader=leader if leader in paths else paths[0])
