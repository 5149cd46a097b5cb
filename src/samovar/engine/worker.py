"""Who owns the pipeline? One worker: it loads a model and makes pictures with it, one prompt at a time."""

from __future__ import annotations

import inspect
import random
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ModelError, SettingError, nearest
from ..files import read_json
from .request import GeneratedPictures, OmniDiffusionSamplingParams, read_defaults
from .settings import EngineConfig, model_folder


class Worker:
    """A loaded pipeline and the model's defaults."""

    def __init__(self, config: EngineConfig) -> None:
        from ..compose import Attached

        folder = model_folder(config.model)
        self.defaults = read_defaults(folder)
        pipeline_class = _pipeline_class(folder)
        started = time.perf_counter()
        self._pipeline = _load_pipeline(pipeline_class, folder, config)
        # None: shown on a terminal, not in a file.
        shows = config.progress and _rank() == 0
        self._pipeline.set_progress_bar_config(disable=None if shows else True, leave=False, desc="denoising")
        self._attached = Attached(self._pipeline, config.attach_config())
        self.load_seconds = time.perf_counter() - started

    def generate(self, prompt: str, params: OmniDiffusionSamplingParams) -> GeneratedPictures:
        """Pictures of a prompt. Every one is the same whether it is made alone or among others."""
        import torch

        if not isinstance(prompt, str):
            raise SettingError(f"A prompt must be text, not {prompt!r}.")
        asked, params = params, params.over(self.defaults)
        if params.seed is None:
            params = replace(params, seed=self._draw_seed())
        call = self._call_arguments(params)
        seeds = tuple(range(params.seed or 0, (params.seed or 0) + (params.num_outputs_per_prompt or 1)))
        started = time.perf_counter()
        images, cache = [], []
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            try:
                images += self._pipeline(prompt=prompt, generator=generator, **call).images
            except SettingError:
                raise
            except ValueError as error:  # How pipelines of diffusers refuse a setting.
                raise SettingError(f"{type(self._pipeline).__name__} refuses these settings: {error}") from error
            if self._attached.cache is not None:
                cache.append(self._attached.cache.stats())
        seconds = time.perf_counter() - started
        notes = self._notes(prompt, params, asked)
        return GeneratedPictures(prompt, tuple(images), seeds, params, seconds, notes, tuple(cache))

    def close(self) -> None:
        """Take everything off the pipeline, so that its memory is given back."""
        self._attached.detach()

    def _draw_seed(self) -> int:
        """A seed by chance, the same on all ranks."""
        drawn = [random.randrange(2**32)]
        if self._attached.config.num_ranks > 1:
            import torch.distributed as dist

            dist.broadcast_object_list(drawn, src=0)
        return drawn[0]

    def _call_arguments(self, params: OmniDiffusionSamplingParams) -> dict[str, Any]:
        """The settings as this pipeline takes them, all checked before anything is computed."""
        multiple = 2 * getattr(self._pipeline, "vae_scale_factor", 4)
        for name in ("height", "width"):
            size = getattr(params, name)
            if size is not None and size % multiple:
                below = max(multiple, size // multiple * multiple)
                raise SettingError(
                    f"{name} must be a multiple of {multiple} for this model, not {size}: try {below} or "
                    f"{size // multiple * multiple + multiple}."
                )
        call = {name: v for name, v in params.given().items() if name not in ("seed", "num_outputs_per_prompt")}
        takes = inspect.signature(self._pipeline.__call__).parameters
        for name in call:
            if name not in takes:
                raise SettingError(f"{type(self._pipeline).__name__} takes no {name}. {nearest(name, takes)}")
        return call

    def _notes(
        self, prompt: str, params: OmniDiffusionSamplingParams, asked: OmniDiffusionSamplingParams
    ) -> tuple[str, ...]:
        """What had no effect: words beyond those that the model reads, and guidance that it does not know."""
        notes = self._length_notes(prompt, params)
        config = getattr(getattr(self._pipeline, "transformer", None), "config", {})
        if asked.guidance_scale is not None and config.get("guidance_embeds") is False:
            notes += ("guidance_scale has no effect on this model, which is not distilled: use true_cfg_scale",)
        return notes

    def _length_notes(self, prompt: str, params: OmniDiffusionSamplingParams) -> tuple[str, ...]:
        tokenizer = getattr(self._pipeline, "tokenizer_2", None) or getattr(self._pipeline, "tokenizer", None)
        if tokenizer is None:
            return ()
        limit = params.max_sequence_length or tokenizer.model_max_length
        length = len(tokenizer(prompt, truncation=False, verbose=False).input_ids)
        if length <= limit:
            return ()
        return (f"the prompt is {length} tokens long, and the model read the first {limit}",)


def _pipeline_class(folder: Path) -> Any:
    """The class that a folder's index names. Importing it takes most of the time until the first picture."""
    import diffusers
    import transformers

    # Their advice and their bars are for people who load models by hand.
    for logging in (transformers.utils.logging, diffusers.utils.logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    name = read_json(folder / "model_index.json").get("_class_name")
    pipeline_class = getattr(diffusers, name, None) if isinstance(name, str) else None
    if pipeline_class is None:
        raise ModelError(
            f"{folder / 'model_index.json'} is of class {name!r}, which diffusers {diffusers.__version__} does not "
            "have. Upgrade diffusers, or check the file."
        )
    return pipeline_class


def _load_pipeline(pipeline_class: Any, folder: Path, config: EngineConfig) -> Any:
    import torch

    device, dtype = config.execution_device(), config.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    given = {"use_safetensors": True, "local_files_only": True}
    with warnings.catch_warnings():
        # diffusers renamed the argument; both names work from 0.42 on, and only the old one before.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        pipeline = pipeline_class.from_pretrained(folder, torch_dtype=getattr(torch, dtype), **given)
    # What is offloaded stays on the host, and never passes through the device whole.
    return pipeline if config.attach_config().offloads else pipeline.to(device)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
