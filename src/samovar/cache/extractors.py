"""How is a model cached that is not built of blocks? Its author takes its forward apart.

An extractor is called in place of the model's forward, with its arguments. It does what comes before
the expensive part, and returns a `CacheContext` that says what the signal is and how to go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import tree
from ..errors import SettingError
from ..trace.forward import added
from ..trace.shadow import TrialFailed, shadow_of, trial
from .decision import Signal
from .inputs import Inputs
from .model import About, Forward, Outcome, Wish

_logger = logging.getLogger(__name__)


@dataclass
class CacheContext:
    """A forward, taken apart."""

    modulated_input: torch.Tensor
    """The signal: what reaches the first attention, or whatever changes as the output does."""
    hidden_states: torch.Tensor
    """What enters the expensive part."""
    encoder_hidden_states: torch.Tensor | None
    """What enters it besides, and is changed by it; None if nothing is."""
    temb: torch.Tensor | None
    """The embedding of the time, for `postprocess`."""
    run_transformer_blocks: Callable[[], tuple[torch.Tensor, ...]]
    """Runs the expensive part: the hidden states, and the encoder's if there are any."""
    postprocess: Callable[[torch.Tensor], Any]
    """Makes the model's output of the hidden states."""
    extra_states: Mapping[str, Any] = field(default_factory=dict)
    """For the author's own use."""


Extractor = Callable[..., CacheContext]

EXTRACTOR_REGISTRY: dict[str, Extractor] = {}
"""By the class name of the model."""


def register_extractor(class_name: str, extractor: Extractor) -> None:
    """Take the forward of a model class apart by hand: `extractor(module, *args, **kwargs) -> CacheContext`."""
    if not isinstance(class_name, str) or not callable(extractor):
        raise SettingError(
            f"register_extractor takes a class name and a function, not {class_name!r} and {extractor!r}."
        )
    EXTRACTOR_REGISTRY[class_name] = extractor


def extractor_for(module: torch.nn.Module) -> Extractor | None:
    """The extractor of a model's class or the nearest of its bases."""
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((EXTRACTOR_REGISTRY[name] for name in names if name in EXTRACTOR_REGISTRY), None)


class ExtractorModel:
    """A model whose forward its author took apart. What the extractor gives is compared with the model's own output
    before it is trusted, once for each form of inputs."""

    def __init__(self, model: torch.nn.Module, extractor: Extractor) -> None:
        self._model = model
        self._extractor = extractor
        self._problems: dict[Hashable, str | None] = {}
        """By form of inputs: why the extractor does not stand for the model, if it does not."""

    @property
    def _name(self) -> str:
        return str(getattr(self._extractor, "__name__", "its extractor"))

    def problem(self, inputs: Inputs) -> str | None:
        return self._problems.get(inputs.signature)

    def about(self) -> About:
        problem = next((text for text in self._problems.values() if text is not None), None)
        return About(f"the modulated input that {self._name} gives", problem)

    def forget(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def run(self, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        if inputs.signature not in self._problems:
            before = inputs.copied()
            output = forward(inputs)
            self._problems[inputs.signature] = self._difference(before, output)
            return Outcome(output, computed=True)
        if self._problems[inputs.signature] is not None:
            return Outcome(forward(inputs), computed=True)
        context = self._extractor(self._model, *inputs.args, **inputs.kwargs)
        signal = Signal(context.modulated_input) if wish.decide is not None else None
        skips = wish.mode == "skip"
        if wish.decide is not None and signal is not None and wish.decide(signal):
            skips = True
        if skips and wish.outlook is None:
            return Outcome(None, computed=False, signal=signal)
        if skips and wish.outlook is not None:
            hidden_states = wish.outlook.added_to(context.hidden_states, 0)
            return Outcome(context.postprocess(hidden_states), computed=False, signal=signal)
        before_blocks = context.hidden_states.clone() if wish.keeps else None  # The blocks may work in place.
        returned = context.run_transformer_blocks()
        hidden_states = returned[0] if isinstance(returned, (tuple, list)) else returned
        parts = None if before_blocks is None else added([before_blocks], [hidden_states])
        return Outcome(context.postprocess(hidden_states), True, parts, signal)

    def _difference(self, inputs: Inputs, output: Any) -> str | None:
        """Why the extractor's way through the model is not the model's own, tried on its shadow."""
        try:
            with trial((inputs.args, inputs.kwargs)):
                context = self._extractor(shadow_of(self._model), *inputs.args, **inputs.kwargs)
                returned = context.run_transformer_blocks()
                hidden_states = returned[0] if isinstance(returned, (tuple, list)) else returned
                difference = tree.difference(context.postprocess(hidden_states), output)
        except TrialFailed as error:
            problem = f"{self._name} cannot be tried ({error})"
        else:
            is_precise = all(t.dtype in (torch.float32, torch.float64) for t in tree.tensors(output))
            if difference <= (1e-4 if is_precise else 5e-2):
                return None
            problem = f"what {self._name} gives differs from the model's own output by {difference:.1e}"
        _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)
        return problem
