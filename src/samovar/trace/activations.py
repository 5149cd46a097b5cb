"""How much memory do the components of a model need beside their weights, at a size?

As a pipeline's rehearsal shows, or for a model without a pipeline a call that was found by trying. What neither shows
is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..arch.components import is_denoiser_itself
from ..arch.skeleton import Parts, build_pipeline, loaded_parts
from ..errors import ModelError
from .guess import guess
from .rehearse import CallForm, Rehearsal, RequestSize, rehearse

_SHARE, _BYTES = 0.10, 32 * 2**20
"""What is added: kernels take memory of their own, and matrix products on a GPU a workspace of 32 MiB."""


@dataclass(frozen=True)
class Activations:
    """What is known of the memory beside the weights."""

    by_name: Mapping[str, int]
    """Bytes by component, with a margin."""
    note: str
    """For which size they are."""
    problem: str | None = None
    """Why some are missing."""
    calls: Mapping[str, CallForm] = field(default_factory=dict)
    """How each component is called, as far as that was seen."""


def activations_of(pipeline: Any, size: RequestSize | None = None) -> Activations:
    """Those of a loaded pipeline or model."""
    parts = loaded_parts(pipeline)
    if is_denoiser_itself(pipeline):
        return _guessed(parts, size or RequestSize())
    size = size or RequestSize()
    seen = rehearse(pipeline, size)
    return _of(seen, parts, size) if seen.calls or seen.peaks else replace(_guessed(parts, size), problem=seen.problem)


def read_activations(source: str, parts: Parts, size: RequestSize | None = None) -> Activations:
    """Those of a model folder or a class, whose `parts` were built without weights."""
    size = size or RequestSize()
    try:
        pipeline = build_pipeline(source, parts)
    except ModelError as error:
        return replace(_guessed(parts, size), problem=str(error))
    return _guessed(parts, size) if pipeline is None else _of(rehearse(pipeline, size), parts, size)


def _guessed(parts: Parts, size: RequestSize) -> Activations:
    found: dict[str, int] = {}
    calls: dict[str, CallForm] = {}
    problem = None
    for name, part in parts.items():
        if part.role == "denoiser" and part.module is not None:
            tried = guess(part.module, size, name)
            found |= tried.peaks
            calls |= tried.calls
            size, problem = tried.size or size, tried.problem or problem
    return _of(Rehearsal(calls, found, size, problem), parts, size)


def _of(seen: Rehearsal, parts: Parts, size: RequestSize) -> Activations:
    peaks = dict(seen.peaks)
    for name, part in parts.items():  # A denoiser for later steps, of which two steps show nothing.
        twins = [peaks[n] for n, other in parts.items() if n in peaks and other.cls is part.cls]
        if name not in peaks and part.role == "denoiser" and twins:
            peaks[name] = max(twins)
    by_name = {name: int(peak * (1 + _SHARE)) + _BYTES for name, peak in peaks.items()}
    missing = [name for name, part in parts.items() if name not in by_name and part.role != "resident"]
    problem = seen.problem or ("it was not called in a run without weights" if missing else None)
    note = f"activations are those of {seen.size or size}, and {_SHARE:.0%} and {_BYTES >> 20} MiB to spare"
    return Activations(by_name, note, problem if missing else None, seen.calls)
