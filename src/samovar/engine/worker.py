"""Who owns the pipeline? One worker: it loads a model and makes pictures with it, one prompt at a time."""

from __future__ import annotations

import inspect
import random
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..builtin import BUILTIN_MODELS
from ..errors import ModelError, SettingError, nearest
from ..files import read_json
from .request import GeneratedPictures, OmniDiffusionSamplingParams, read_defaults

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def model_folder(model: str) -> Path:
    """Where a model is: one that comes with Samovar, by name, or a folder in diffusers format."""
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    folder = Path(model).expanduser()
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{model!r} is neither a model that comes with Samovar nor a folder with a model_index.json. "
            f"{nearest(model, BUILTIN_MODELS)} A model of the hub must be downloaded first: "
            "hf download NAME --local-dir FOLDER"
        )
    return folder


class Worker:
    """A loaded pipeline and the model's defaults."""

    def __init__(self, model: str, *, dtype: str = "auto", device: str | None = None, progress: bool = True) -> None:
        if dtype not in _DTYPES:
            raise SettingError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}. {nearest(dtype, _DTYPES)}")
        _check_device(device)
        folder = model_folder(model)
        self.defaults = read_defaults(folder)
        pipeline_class = _pipeline_class(folder)
        started = time.perf_counter()
        self._pipeline = _load_pipeline(pipeline_class, folder, dtype, device)
        self.load_seconds = time.perf_counter() - started
        # None: shown on a terminal, not in a file.
        self._pipeline.set_progress_bar_config(disable=None if progress else True, leave=False, desc="denoising")

    def generate(self, prompt: str, params: OmniDiffusionSamplingParams) -> GeneratedPictures:
        """Pictures of a prompt. Every one is the same whether it is made alone or among others."""
        import torch

        if not isinstance(prompt, str):
            raise SettingError(f"A prompt must be text, not {prompt!r}.")
        asked, params = params, params.over(self.defaults)
        if params.seed is None:
            params = replace(params, seed=random.randrange(2**32))
        call = self._call_arguments(params)
        seeds = tuple(range(params.seed or 0, (params.seed or 0) + (params.num_outputs_per_prompt or 1)))
        started = time.perf_counter()
        images = []
        for seed in seeds:
            generator = torch.Generator("cpu").manual_seed(seed)
            try:
                images += self._pipeline(prompt=prompt, generator=generator, **call).images
            except ValueError as error:  # How pipelines of diffusers refuse a setting.
                raise SettingError(f"{type(self._pipeline).__name__} refuses these settings: {error}") from error
        seconds = time.perf_counter() - started
        return GeneratedPictures(prompt, tuple(images), seeds, params, seconds, self._notes(prompt, params, asked))

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


def _check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise SettingError(f"{device!r} is no device. Give cpu, cuda, or cuda:1 for the second GPU.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            f"{device!r} cannot be used: torch {torch.__version__} finds no GPU here. Leave it out, or give cpu."
        )


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


def _load_pipeline(pipeline_class: Any, folder: Path, dtype: str, device: str | None) -> Any:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    given = {"use_safetensors": True, "local_files_only": True}
    with warnings.catch_warnings():
        # diffusers renamed the argument; both names work from 0.42 on, and only the old one before.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        pipeline = pipeline_class.from_pretrained(folder, torch_dtype=getattr(torch, dtype), **given)
    return pipeline.to(device)
