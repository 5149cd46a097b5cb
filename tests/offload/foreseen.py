"""What the tests of time-only layers share: tiny models whose small layers count, and a plain loop around a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload
from samovar.offload import time_layers as ahead_layers
from samovar.offload.stats import TimeStats
from samovar.trace import time_only


def count_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_layers, "MIN_IN_BLOCKS", 64)
    monkeypatch.setattr(ahead_layers, "MIN_OUTSIDE", 64)
    monkeypatch.setattr(time_only, "SMALL_OUTPUT", 64.0)


def ahead(pipe: Any, mode: str = "layerwise", *, lazy: bool = True, **config: Any) -> Offloaded:
    settings = OffloadConfig(mode, precompute=True, activations=0, **config)  # type: ignore[arg-type]
    return apply_offload(pipe, settings, stage=HostStage(lazy=lazy))


def stats(offloaded: Offloaded, name: str = "transformer") -> TimeStats:
    return offloaded.stats().ahead[name]


class Loop:
    """A pipeline around any model of the zoo, with any scheduler."""

    def __init__(self, case: zoo.Case, scheduler: Any) -> None:
        self.case, self.transformer, self.scheduler = case, case.build(), scheduler
        self.before: Any = None
        """Called with the number of each step."""

    def inputs(self, sample: torch.Tensor, t: torch.Tensor, place: int, **changes: Any) -> dict[str, Any]:
        given = self.case.inputs(0) | changes
        name = next(name for name, value in given.items() if isinstance(value, torch.Tensor) and "timestep" in name)
        time = self.scheduler.scale_model_input(sample, t) if False else t
        given["hidden_states"] = sample
        given[name] = time.to(given[name].dtype).expand(given[name].shape)
        return given

    def __call__(self, steps: int = 4, **changes: Any) -> torch.Tensor:
        self.scheduler.set_timesteps(steps)
        sample = self.case.inputs(0)["hidden_states"]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for place, t in enumerate(self.scheduler.timesteps):
                if self.before is not None:
                    self.before(place)
                output = self.transformer(**self.inputs(sample, t, place, **changes), return_dict=False)[0]
                noise = torch.randn(sample.shape, generator=generator)
                sample = sample + 0.1 * output[:, : sample.shape[1]] + 0.01 * noise
        return sample
