"""How much memory do the components of a model need beside their weights, at a size?

As a pipeline's rehearsal shows, or for a model without a pipeline a call that was found by trying. What neither shows
is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..arch.skeleton import Parts, build_pipeline, loaded_parts
from ..core.errors import ModelError
from .guess import LATENT, guess
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
    """How components are called, as far as it was seen."""


def activations_of(pipeline: Any, size: RequestSize | None = None) -> Activations:
    """Those of a loaded pipeline or model. SettingError for a size that it does not take."""
    size = size or RequestSize()
    return _of(rehearse(pipeline, size), loaded_parts(pipeline), size)


def read_activations(source: str, parts: Parts, size: RequestSize | None = None) -> Activations:
    """Those of a model folder or a class, whose `parts` were built without weights."""
    size = size or RequestSize()
    try:
        pipeline = build_pipeline(source, parts)
    except ModelError as error:
        return _of(Rehearsal(problem=str(error)), parts, size)
    return _of(Rehearsal() if pipeline is None else rehearse(pipeline, size), parts, size)


def _of(seen: Rehearsal, parts: Parts, size: RequestSize) -> Activations:
    """What a rehearsal shows; of denoisers that it does not show, what is found by trying."""
    peaks, calls, problem = dict(seen.peaks), dict(seen.calls), seen.problem
    made = seen.size and str(seen.size)
    for name, part in parts.items():
        if name in peaks or part.role != "denoiser" or part.module is None:
            continue
        twin = next((n for n, other in parts.items() if n in peaks and n in calls and other.cls is part.cls), None)
        if twin is not None:  # It is for later steps.
            peaks[name] = peaks[twin]
            calls.setdefault(name, calls[twin])
        else:
            tried = guess(part.module, size, name)
            peaks |= tried.peaks
            calls = {**tried.calls, **calls}
            made, problem = made or (tried.size and f"{tried.size} (if {LATENT})"), problem or tried.problem
    by_name = {name: int(peak * (1 + _SHARE)) + _BYTES for name, peak in peaks.items()}
    missing = [name for name, part in parts.items() if name not in by_name and part.role != "resident"]
    problem = problem or ("it was not called in a run without weights" if missing else None)
    note = f"activations are those of {made or size}, and {_SHARE:.0%} and {_BYTES >> 20} MiB to spare"
    return Activations(by_name, note, problem if missing else None, calls)
