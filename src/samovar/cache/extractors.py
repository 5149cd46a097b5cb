"""Extractors: a model's forward taken apart by its author, or the modulated input that decides for its blocks.

An extractor of a whole forward is called in place of it, with its arguments. It does what comes before the expensive
part, and returns a `CacheContext` with the signal and the way to go on. An extractor of `(module, hidden_states, temb)`
returns the modulated input alone; what is skipped are the model's blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core import nested
from ..core.errors import SettingError
from ..trace.forward import Tensors, added
from ..trace.skip_pass import Mode, tolerance
from ..trace.twin import TrialFailed, trial, twin_of
from .run import Call
from .signal import Signal
from .steps import About
from .threshold import Decide, Outcome, ThresholdSteps


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


Extractor = Callable[..., CacheContext | torch.Tensor]

EXTRACTOR_REGISTRY: dict[str, Extractor] = {}
"""By the class name of the model."""


def register_extractor(class_name: str, extractor: Extractor) -> None:
    """Take the forward of a model class apart by hand: `extractor(module, *args, **kwargs) -> CacheContext`; or only
    read its modulated input: `extractor(module, hidden_states, temb) -> Tensor`."""
    if not isinstance(class_name, str) or not callable(extractor):
        message = f"register_extractor takes a class name and a function, not {class_name!r} and {extractor!r}."
        raise SettingError(message, param="extractor" if isinstance(class_name, str) else "class_name")
    EXTRACTOR_REGISTRY[class_name] = extractor


def extractor_for(module: torch.nn.Module, class_name: str | None = None) -> Extractor | None:
    """The extractor of a class by name, or of a model's class or the nearest of its bases."""
    names = [class_name] if class_name else [cls.__name__ for cls in type(module).__mro__]
    return next((EXTRACTOR_REGISTRY[name] for name in names if name in EXTRACTOR_REGISTRY), None)


def takes_blocks(extractor: Extractor | None) -> bool:
    """Whether the model's blocks are skipped: there is no extractor, or it only reads the modulated input."""
    if extractor is None:
        return True
    try:
        return list(inspect.signature(extractor).parameters)[1:] == ["hidden_states", "temb"]
    except (TypeError, ValueError):  # Of code in C nothing can be read.
        return False


class ExtractorSteps(ThresholdSteps):
    """Takes the steps of a model whose forward its author took apart. For each form of inputs, the extractor's result
    is first compared with the model's own output."""

    def __init__(self, model: torch.nn.Module, extractor: Callable[..., Any], *settings: Any) -> None:
        super().__init__(model, tuple, *settings)
        self._extractor = extractor
        self._name = str(getattr(extractor, "__name__", "its extractor"))
        self._checked: set[Hashable] = set()

    def about(self) -> About:
        return About(f"the modulated input from {self._name}", next(iter(self._refused.values()), None))

    def _run(self, call: Call, mode: Mode, decide: Decide | None) -> Outcome:
        if call.signature not in self._checked:
            return self._first(call, decide)
        context = self._extractor(self._model, *call.args, **call.kwargs)
        signal = None if decide is None else Signal(context.modulated_input)
        if mode == "skip" or (decide is not None and signal is not None and decide(signal)):
            residuals = call.state.residuals
            assert residuals is not None
            hidden_states = context.hidden_states + residuals[0]
            return Outcome(context.postprocess(hidden_states), False, None, signal)
        return Outcome(*_run_blocks(context), signal)

    def _first(self, call: Call, decide: Decide | None) -> Outcome:
        """Compute a step with the model itself, and compare the extractor's result on the model's twin."""
        before = call.copied()
        output = call.compute()
        try:
            with trial((before.args, before.kwargs)):
                context = self._extractor(twin_of(self._model), *before.args, **before.kwargs)
                signal = Signal(context.modulated_input)
                found, _, residuals = _run_blocks(context)
                difference = nested.difference(found, output)
        except TrialFailed as error:
            self._refuse(call, f"{self._name} cannot be tried ({error})")
            return Outcome(output)
        if not difference <= tolerance(output):
            self._refuse(call, f"{self._name} differs from the model itself by {difference:.1e}")
            return Outcome(output)
        self._checked.add(call.signature)
        return Outcome(output, True, residuals, signal if decide is not None else None)


def _run_blocks(context: CacheContext) -> tuple[Any, bool, Tensors]:
    """The output of a computed step, and what the expensive part added to the hidden states."""
    before = context.hidden_states.clone()  # The blocks may work in place.
    returned = context.run_transformer_blocks()
    hidden_states = returned[0] if isinstance(returned, (tuple, list)) else returned
    return context.postprocess(hidden_states), True, added([before], [hidden_states])
