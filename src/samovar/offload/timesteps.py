"""Which timesteps will the model be given in the rest of a run?

Pipelines hand the scheduler's timesteps to the model in some form: as they are, divided by a thousand, as 1 - t, in the
sample's dtype. The right form gives the bits of the current call. A wrong guess costs time, never bits: what was
computed ahead is used only where the model is given those bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..hooks import Run

MOST_AHEAD = 128
"""Steps that are computed ahead at once, at most."""
_FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,
    lambda t: t / 1000,
    lambda t: 1 - t,
    lambda t: 1 - t / 1000,
    lambda t: (1000 - t) / 1000,
    lambda t: t * 1000,
    lambda t: 1000 - t,
)


def coming_inputs(run: Run | None, given: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What the model will be given at the later steps of a run in place of these tensors; nothing if nobody knows."""
    if run is None or run.loop() is None:
        return []
    later = [list(_later(run, tensor)) for tensor in given]
    following = [place for place, forms in enumerate(later) if forms]
    if len(following) == 1:  # Forms that agree now may differ later: all of their values are likely.
        (place,) = following
        values = dict.fromkeys(value for form in later[place] for value in form)
        steps: list[dict[int, float]] = [{place: value} for value in values]
    else:  # A second timestep, or a noise level, goes along.
        count = max((len(later[place][0]) for place in following), default=0)
        steps = [{place: later[place][0][step] for place in following} for step in range(count)]
    return [
        [torch.full_like(tensor, step[place]) if place in step else tensor for place, tensor in enumerate(given)]
        for step in steps[:MOST_AHEAD]
    ]


def _later(run: Run, tensor: torch.Tensor) -> Iterator[list[float]]:
    """The later values of a tensor, in each form of the scheduler's times that has its value now."""
    if tensor.is_meta or not tensor.numel() or not bool((tensor == tensor.reshape(-1)[0]).all()):
        return
    now, count = tensor.reshape(-1)[0].item(), len(run.loop())
    seen: set[tuple[float, ...]] = set()
    for name in ("timesteps", "sigmas"):
        times = getattr(run.pipeline.scheduler, name, None)
        if not isinstance(times, torch.Tensor) or times.ndim != 1 or times.is_meta:
            continue
        for early in dict.fromkeys((times.dtype, tensor.dtype, torch.float32, torch.bfloat16, torch.float16)):
            for form in _FORMS:
                values = form(times.to(tensor.device, early)).to(tensor.dtype).tolist()[:count]
                after = tuple(values[values.index(now) + 1 :]) if now in values else ()
                if after and after not in seen:
                    seen.add(after)
                    yield list(after)
