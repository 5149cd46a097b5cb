"""How is Samovar used from Python? `Omni(model).generate(prompt)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from .engine import EngineConfig, GeneratedPictures, OmniDiffusionSamplingParams, RankedWorkers, Worker, start_worker
from .errors import SettingError


class Omni:
    """A model, ready to make pictures.

        with Omni("emoji") as omni:
            omni.generate("a grinning cat, 3d style", seed=7)[0].images[0].save("cat.png")

    `model` is the name of one that comes with Samovar, or a folder in diffusers format. `cache_backend` skips
    steps that would change little ("forecast", "tea_cache", or another by its name), with the settings in
    `cache_config`; what it did is in the results.

    `gpu_memory="12GiB"` offloads as little as that much memory demands; `enable_cpu_offload` lets components take
    turns on the GPU, `enable_layerwise_offload` streams their blocks. With `ulysses_degree`, `ring_degree` or
    `cfg_parallel_size`, several processes make each picture, on as many GPUs, or on the CPU: their number is the
    product of the three. They are started here and end with `close`; a script that starts them needs the guard
    `if __name__ == "__main__":`, as each of them imports it. Under torchrun they are there already.
    """

    def __init__(
        self,
        model: str = "emoji",
        *,
        dtype: str = "auto",
        device: str | None = None,
        progress: bool = True,
        cache_backend: str | None = None,
        cache_config: Mapping[str, Any] | None = None,
        enable_cpu_offload: bool = False,
        enable_layerwise_offload: bool = False,
        gpu_memory: str | int | None = None,
        ulysses_degree: int = 1,
        ring_degree: int = 1,
        cfg_parallel_size: int = 1,
    ) -> None:
        config = EngineConfig(
            model,
            dtype=dtype,
            device=device,
            progress=progress,
            cache_backend=cache_backend,
            cache_config=cache_config,
            enable_cpu_offload=enable_cpu_offload,
            enable_layerwise_offload=enable_layerwise_offload,
            gpu_memory=gpu_memory,
            ulysses_degree=ulysses_degree,
            ring_degree=ring_degree,
            cfg_parallel_size=cfg_parallel_size,
        )
        self._worker: Worker | RankedWorkers | None = start_worker(config)

    @property
    def defaults(self) -> OmniDiffusionSamplingParams:
        """What is used where neither the parameters nor the overrides say anything."""
        return self._open_worker().defaults

    @property
    def load_seconds(self) -> float:
        """How long the weights took to load."""
        return self._open_worker().load_seconds

    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: OmniDiffusionSamplingParams | None = None,
        **overrides: Any,
    ) -> list[GeneratedPictures]:
        """Pictures for one prompt or several, in their order. Overrides are settings by name, for this call."""
        worker = self._open_worker()
        params = OmniDiffusionSamplingParams.from_dict(overrides).over(sampling_params or OmniDiffusionSamplingParams())
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        return [worker.generate(one, params) for one in prompts]

    def close(self) -> None:
        """Let the model go, and end its processes. A closed Omni makes no more pictures."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _open_worker(self) -> Worker | RankedWorkers:
        if self._worker is None:
            raise SettingError("This Omni is closed. Make a new one.")
        return self._worker

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
