"""How is Samovar used from Python? `Omni(model).generate(prompt)`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from .engine import GeneratedPictures, OmniDiffusionSamplingParams, Worker
from .errors import SettingError


class Omni:
    """A model, ready to make pictures.

        with Omni("emoji") as omni:
            omni.generate("a grinning cat, 3d style", seed=7)[0].images[0].save("cat.png")

    `model` is the name of one that comes with Samovar, or a folder in diffusers format.
    """

    def __init__(
        self, model: str = "emoji", *, dtype: str = "auto", device: str | None = None, progress: bool = True
    ) -> None:
        self._worker: Worker | None = Worker(model, dtype=dtype, device=device, progress=progress)

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
        """Let the model go. A closed Omni makes no more pictures."""
        self._worker = None

    def _open_worker(self) -> Worker:
        if self._worker is None:
            raise SettingError("This Omni is closed. Make a new one.")
        return self._worker

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
