"""A model with gates at its blocks, whose forwards a test sends through passes of its own."""

from __future__ import annotations

import inspect
from typing import Any

import torch

import zoo
from samovar.arch import find_anatomy
from samovar.core import nested
from samovar.trace.forward import Watched, Watcher
from samovar.trace.gates import Gates, Pass
from samovar.trace.skip_pass import Rehearsed, StepPass, rehearse

Given = tuple[tuple[Any, ...], dict[str, Any]]


def given(*args: Any, **kwargs: Any) -> Given:
    return args, kwargs


class Gated:
    """A model and its gates."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.structure = find_anatomy(model)
        self.gates = Gates(model, self.structure, "gates")
        self._names = tuple(inspect.signature(model.forward).parameters)

    def of(self, found: zoo.Case, step: int = 0) -> Given:
        """What a step of a zoo case is given."""
        plain = {"return_dict": False} if "return_dict" in self._names else {}
        return (), found.inputs(step) | plain

    @torch.no_grad()
    def through(self, running: Pass, inputs: Given) -> Any:
        """What the model gives, with its gates asking this pass."""
        args, kwargs = nested.map_tensors(lambda tensor: tensor, inputs)  # Some empty the lists that they are given.
        with torch.compiler.set_stance("force_eager"), self.gates.asking(running):
            output = self.model(*args, **kwargs)
        if isinstance(running, StepPass):
            running.finish()
        return output

    def watched(self, inputs: Given) -> tuple[Watched, Any]:
        """What watching a forward gives, and the output."""
        watcher = Watcher(self.model, self.structure)
        output = self.through(watcher, inputs)
        return watcher.watched(), output

    def rehearsed(self, inputs: Given, later: Given) -> tuple[Watched, Rehearsed]:
        """The same, and what trying a skipped step gives."""
        watched, output = self.watched(inputs)

        def another(with_time: bool) -> Given:
            args, kwargs = later
            times = {name: value for name, value in inputs[1].items() if "time" in name}
            return (args, kwargs) if with_time else ((*args[:1], *inputs[0][1:]), kwargs | times)

        return watched, rehearse(self.model, self.gates.by_module, watched, inputs, output, another)
