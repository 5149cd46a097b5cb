"""How is a model cached that is not built of blocks? Its author takes its forward apart.

An extractor is called in place of the model's forward, with its arguments. It does what comes before
the expensive part, and returns a `CacheContext` that says what the signal is and how to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import SettingError


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
