"""How is a model cached that is not built of blocks? Its author takes its forward apart.

An extractor is called in place of the model's forward, with its arguments. It does what comes before the expensive
part, and returns a `CacheContext` with the signal and the way to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import nested
from ..core.errors import SettingError
from ..trace.forward import Tensors, added
from ..trace.passes import tolerance
from ..trace.shadow import TrialFailed, shadow_of, trial
from .decision import Signal
from .inputs import Inputs
from .model import About, CacheableModel, Forward, Instruction, Outcome


@dataclass
class CacheContext:
    """A forward, taken apart."""

    modulated_input: torch.Tensor
    """The signal: the input of the first attention, or whatever changes as the output does."""
    hidden_states: torch.Tensor
    """The input of the expensive part."""
    encoder_hidden_states: torch.Tensor | None
    """Its second input, if it has one that it changes."""
    temb: torch.Tensor | None
    """The timestep embedding, for `postprocess`."""
    run_transformer_blocks: Callable[[], tuple[torch.Tensor, ...]]
    """Runs the expensive part; returns the hidden states, and the encoder's if there are any."""
    postprocess: Callable[[torch.Tensor], Any]
    """Turns the hidden states into the model's output."""
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    """For the author's use."""


Extractor = Callable[..., CacheContext]

EXTRACTOR_REGISTRY: dict[str, Extractor] = {}
"""By the class name of the model."""


def register_extractor(class_name: str, extractor: Extractor) -> None:
    """Take the forward of a model class apart by hand: `extractor(module, *args, **kwargs) -> CacheContext`."""
    if not isinstance(class_name, str) or not callable(extractor):
        message = f"register_extractor takes a class name and a function, not {class_name!r} and {extractor!r}."
        raise SettingError(message, param="extractor" if isinstance(class_name, str) else "class_name")
    EXTRACTOR_REGISTRY[class_name] = extractor


def extractor_for(module: torch.nn.Module) -> Extractor | None:
    """The extractor of a model's class or the nearest of its bases."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((EXTRACTOR_REGISTRY[name] for name in names if name in EXTRACTOR_REGISTRY), None)


class ExtractorModel(CacheableModel):
    """A model whose forward its author took apart. For each form of inputs, the extractor's result is first compared
    with the model's own output."""

    def __init__(self, model: torch.nn.Module, extractor: Extractor) -> None:
        super().__init__(model)
        self._extractor = extractor
        self._name = str(getattr(extractor, "__name__", "its extractor"))
        self._checked: set[Hashable] = set()

    def about(self) -> About:
        problem = next(iter(self._refused.values()), None)
        return About(f"the modulated input from {self._name}", problem)

    def run(self, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        if inputs.signature in self._refused:
            return Outcome(forward(inputs.args, inputs.kwargs), computed=True)
        if inputs.signature not in self._checked:
            return self._first(inputs, wanted, forward)
        context = self._extractor(self._model, *inputs.args, **inputs.kwargs)
        signal = Signal(context.modulated_input) if wanted.decide is not None else None
        if wanted.mode == "skip" or (wanted.decide is not None and signal is not None and wanted.decide(signal)):
            hidden_states = None if wanted.outlook is None else wanted.outlook.added_to(context.hidden_states, 0)
            return Outcome(None if hidden_states is None else context.postprocess(hidden_states), False, None, signal)
        output, parts = _run_blocks(context, keeps=wanted.keeps)
        return Outcome(output, True, parts, signal)

    def _first(self, inputs: Inputs, wanted: Instruction, forward: Forward) -> Outcome:
        """Compute a step with the model itself, and compare the extractor's result on the model's shadow."""
        before = inputs.copied()
        output = forward(inputs.args, inputs.kwargs)
        try:
            with trial((before.args, before.kwargs)):
                context = self._extractor(shadow_of(self._model), *before.args, **before.kwargs)
                signal = Signal(context.modulated_input)
                found, parts = _run_blocks(context, keeps=True)
                difference = nested.difference(found, output)
        except TrialFailed as error:
            return self._refuse(inputs.signature, f"{self._name} cannot be tried ({error})", output)
        if not difference <= tolerance(output):
            problem = f"{self._name} differs from the model itself by {difference:.1e}"
            return self._refuse(inputs.signature, problem, output)
        self._checked.add(inputs.signature)
        return Outcome(output, True, parts if wanted.keeps else None, signal if wanted.decide is not None else None)


def _run_blocks(context: CacheContext, *, keeps: bool) -> tuple[Any, Tensors | None]:
    """The output, and what the expensive part added to the hidden states, if that is kept."""
    before = context.hidden_states.clone() if keeps else None  # The blocks may work in place.
    returned = context.run_transformer_blocks()
    hidden_states = returned[0] if isinstance(returned, (tuple, list)) else returned
    return context.postprocess(hidden_states), None if before is None else added([before], [hidden_states])
