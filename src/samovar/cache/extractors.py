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
from ..trace.fingerprint import Generation
from ..trace.forward import Tensors, added
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
        self._generation = Generation(model)
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

    def generation(self) -> int:
        return self._generation.check()

    def forget(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def run(self, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        if inputs.signature not in self._problems:
            return self._first(inputs, wish, forward)
        if self._problems[inputs.signature] is not None:
            return Outcome(forward(inputs), computed=True)
        context = self._extractor(self._model, *inputs.args, **inputs.kwargs)
        signal = Signal(context.modulated_input) if wish.decide is not None else None
        if wish.mode == "skip" or (wish.decide is not None and signal is not None and wish.decide(signal)):
            hidden_states = None if wish.outlook is None else wish.outlook.added_to(context.hidden_states, 0)
            return Outcome(None if hidden_states is None else context.postprocess(hidden_states), False, None, signal)
        output, parts = _run_blocks(context, keeps=wish.keeps)
        return Outcome(output, True, parts, signal)

    def _first(self, inputs: Inputs, wish: Wish, forward: Forward) -> Outcome:
        """Compute a step by the model itself, and compare the extractor's way through the model's shadow."""
        parts, signal = None, None
        before = inputs.copied()
        output = forward(inputs)
        try:
            with trial((before.args, before.kwargs)):
                context = self._extractor(shadow_of(self._model), *before.args, **before.kwargs)
                signal = Signal(context.modulated_input)
                found, parts = _run_blocks(context, keeps=True)
                difference = tree.difference(found, output)
        except TrialFailed as error:
            problem: str | None = f"{self._name} cannot be tried ({error})"
        else:
            is_precise = all(tensor.dtype in (torch.float32, torch.float64) for tensor in tree.tensors(output))
            is_right = difference <= (1e-4 if is_precise else 5e-2)
            problem = (
                None if is_right else f"{self._name} gives something else than the model itself, by {difference:.1e}"
            )
        self._problems[inputs.signature] = problem
        if problem is not None:
            _logger.warning("%s is not cached: %s", type(self._model).__name__, problem)
            return Outcome(output, computed=True)
        return Outcome(output, True, parts if wish.keeps else None, signal if wish.decide is not None else None)


def _run_blocks(context: CacheContext, *, keeps: bool) -> tuple[Any, Tensors | None]:
    """The output, and what the expensive part added to the hidden states."""
    before = context.hidden_states.clone() if keeps else None  # The blocks may work in place.
    returned = context.run_transformer_blocks()
    hidden_states = returned[0] if isinstance(returned, (tuple, list)) else returned
    return context.postprocess(hidden_states), None if before is None else added([before], [hidden_states])
