"""Where a model is, and how its pipeline is loaded."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..arch.folder import WEIGHTS, check_folder, check_loaded, pipeline_class
from ..arch.modular import adapt
from ..builtin import BUILTIN_MODELS, MAX_SIDE
from ..cache import TunedFor
from ..core.errors import ModelError, SettingError, nearest
from ..core.files import INDEX, brief, first_line, heard, index_file, reading
from ..core.interop import pipelines_by_task
from ..offload.quantization_choice import EXACT
from .calling import replaced
from .outputs import output_fields
from .planning import make_plan
from .quantize import GGUF, Quantization, loading_arguments
from .request import OmniDiffusionSamplingParams

if TYPE_CHECKING:
    from .settings import OmniDiffusionConfig

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOADING = threading.Lock()


def find_model(model: str) -> Path | None:
    """The folder of a model that is built in or here in diffusers format; None for a model of the hub."""
    if not isinstance(model, str):
        raise ModelError(f"model must be a name or a folder, not {brief(model)}.")
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # No path: too long, with a NUL, of an unknown user.
        folder = Path(model).expanduser()
        if index_file(folder).is_file():
            return folder
        if HUB_NAME.fullmatch(model) and not folder.is_dir():
            return None
    if model.endswith(GGUF):
        raise ModelError(
            f"{brief(model)} is a GGUF file, which holds one component. Give the model's folder or name, and the file "
            "as quantization."
        )
    raise ModelError(
        f"{brief(model)} is not a built-in model, a folder with a {INDEX}, or a model of the hub such as 'owner/name'. "
        f"{nearest(model, BUILTIN_MODELS)}"
    )


@contextlib.contextmanager
def downloading(what: str, remedy: str = "") -> Iterator[None]:
    """Name what is not there, or cannot be reached."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{what} is not here and could not be downloaded from the hub: {first_line(error)} Check the name and the "
            f"network{remedy}."
        ) from error


def fetch_model(model: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model. One of the hub comes from the local cache, or is downloaded."""
    folder = find_model(model)
    if folder is not None:
        return folder
    download = load_diffusers().DiffusionPipeline.download
    with downloading(repr(model), f", or download it elsewhere: hf download {model} --local-dir FOLDER"):
        return Path(download(model, use_safetensors=True, trust_remote_code=trust_remote_code))


@contextlib.contextmanager
def without_remote_code() -> Iterator[None]:
    """Set DIFFUSERS_DISABLE_REMOTE_CODE for now. diffusers reads the variable itself only once, on import."""
    from diffusers.utils import dynamic_modules_utils as switches

    with _LOADING, replaced(switches, "DIFFUSERS_DISABLE_REMOTE_CODE", True):  # Else one could restore another's value.
        yield


def hush_quantisers() -> None:
    """Keep quantisation packages, which diffusers imports if they are there, from telling what they lack."""
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for name in ("torchao", "bitsandbytes", "sdnq", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def load_diffusers() -> Any:
    """diffusers, without its progress bars and its advice for people who load models by hand."""
    hush_quantisers()
    import diffusers
    import transformers

    for theirs in (transformers.utils.logging, diffusers.utils.logging):
        theirs.disable_progress_bar()
        theirs.set_verbosity_error()
    return diffusers


@contextlib.contextmanager
def _nothing_missing(folder: Path) -> Iterator[None]:
    """Refuse a model that was loaded inside without some of its weights, which transformers fills with random numbers:
    it says so in a warning alone."""
    with heard("transformers.modeling_utils") as said:
        yield
    missing = re.findall(r"^(\S+) *\| *(?:\x1b\[\d+m)?MISSING", "\n".join(said), re.MULTILINE)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder} lacks the weights {missing[0]!r}{more}. Download or save it again.")


def find_loader(folder: Path, *, trust_remote_code: bool = False, task: str | None = None) -> Any:
    """The class that the folder's index names, or the one of its family for a task. Importing it takes most of the time
    until the first image."""
    index = check_folder(folder, trust_remote_code=trust_remote_code)
    diffusers = load_diffusers()
    if isinstance(index.get("_class_name"), list):
        if task is not None:
            raise ModelError(f"{folder} comes with a class of its own, so a task cannot be chosen. Leave out task.")
        return diffusers.DiffusionPipeline  # It finds the class in the folder.
    cls = pipeline_class(folder, index)
    return cls if task is None else class_for_task(cls, task)


def class_for_task(cls: Any, task: str) -> Any:
    """The pipeline that does a task with the parts of another one, by diffusers' own tables."""
    tables = pipelines_by_task()
    families = {family for table in tables.values() for family, each in table.items() if each is cls}
    found = {name: table[family] for name, table in tables.items() for family in families if family in table}
    if task in found:
        return found[task]
    if task not in tables:
        hint = "Give a folder that was saved with its ControlNet." if "controlnet" in task else nearest(task, tables)
        raise SettingError(f"task={task!r} is not a task. {hint}", param="task")
    known = f"With it: {', '.join(sorted(found))}." if found else "Leave out task."
    raise SettingError(f"task={task!r}: diffusers has no pipeline for it like {cls.__name__}. {known}", param="task")


def load_pipeline(
    folder: Path,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    components: Mapping[str, Any] | None = None,
    loader: Any = None,
) -> Any:
    """The pipeline of a folder, on the host; what bitsandbytes quantises, on the GPU. `components` need no loading."""
    loader = loader or find_loader(folder, trust_remote_code=trust_remote_code)
    given: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": trust_remote_code}
    given |= components or {}
    guard = contextlib.nullcontext() if trust_remote_code else without_remote_code()
    with reading(str(folder)), guard, warnings.catch_warnings(), _nothing_missing(folder):
        # diffusers 0.42 renamed the argument, and older versions only know this name.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        given |= loading_arguments(folder, dtype, quantization) if quantization is not None else {}
        pipeline = loader.from_pretrained(folder, torch_dtype=dtype, variant=find_variant(folder), **given)
        return check_loaded(pipeline, folder)


def find_variant(folder: Path) -> str | None:
    """The variant to load, such as "fp16", if some part of the model comes in no other; else None."""
    found: dict[Path, set[str | None]] = {}
    for file in folder.glob("*/*.safetensors"):
        if match := WEIGHTS.fullmatch(file.name):
            found.setdefault(file.parent, set()).add(match.group(1))
    only = {min(variants, key=str) for variants in found.values() if None not in variants}
    if len(only) > 1:
        raise ModelError(f"{folder} mixes the variants {', '.join(sorted(map(str, only)))}. Keep one of them.")
    return only.pop() if only else None


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a setting; "auto" is bfloat16 on GPUs."""
    auto = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, auto if name == "auto" else name)
    return dtype


# ------------------------------------------------------------------------------------------------ an engine


class Loaded(NamedTuple):
    """A pipeline, and what is known of it."""

    pipeline: Any
    device: torch.device
    defaults: OmniDiffusionSamplingParams
    started: float
    """When loading began; imports do not count."""
    why_quantised: str = ""
    max_side: int | None = None
    """In pixels, if the model has a limit that it does not tell."""
    restore: Callable[[], None] = lambda: None


def load_model(config: OmniDiffusionConfig, components: Mapping[str, Any] | None = None) -> Loaded:
    """The pipeline of a model's folder, on the host, but for components that are loaded already."""
    folder, device = fetch_model(config.model, trust_remote_code=config.trust_remote_code), config.execution_device()
    if (tuned := TunedFor.read(config.cache)) is not None:  # One for another model is refused before weights are read.
        tuned.check_folder(folder)
    defaults, dtype = config.sampling_defaults(folder), resolve_dtype(config.dtype, device)
    is_trusted = config.trust_remote_code
    loader = find_loader(folder, trust_remote_code=is_trusted, task=config.task)
    if loader.__name__ != "DiffusionPipeline":  # Otherwise the class comes with the model.
        output_fields(loader)
    started = time.perf_counter()
    quantised, why = _quantization(config, folder, dtype, defaults)
    how = {"trust_remote_code": is_trusted, "loader": loader}
    pipeline = load_pipeline(folder, dtype, quantization=quantised, components=components, **how)
    # A bar is shown on a terminal (None), not in a file.
    is_shown = config.progress and os.environ.get("RANK", "0") == "0"
    pipeline.set_progress_bar_config(disable=None if is_shown else True, leave=False, desc="denoising")
    return Loaded(pipeline, device, defaults, started, why, MAX_SIDE if config.model in BUILTIN_MODELS else None)


def adopt(config: OmniDiffusionConfig, pipeline: Any) -> Loaded:
    """A pipeline that is loaded, where its owner put it. Settings that come too late for it are refused."""
    name = type(pipeline).__name__
    if config.task is not None:
        raise SettingError(f"This {name} is loaded, so its task is decided. Leave out task.", param="task")
    if config.quantised() is not None or config.loss not in (None, "exact"):
        raise SettingError(
            f"Weights are quantised while they are loaded, and this {name} is loaded. Give the model's name or folder, "
            "or load it with a quantization_config of diffusers and leave out quantization and loss.",
            param="quantization" if config.loss is None else "loss",
        )
    device = pipeline.device if config.device is None else config.execution_device()
    return Loaded(pipeline, device, config.sampling_defaults(None), time.perf_counter(), restore=adapt(pipeline))


def _quantization(
    config: OmniDiffusionConfig, folder: Path, dtype: torch.dtype, defaults: OmniDiffusionSamplingParams
) -> tuple[Quantization | None, str]:
    """What to quantise, and why."""
    attached, device, quantised = config.attach_config, config.execution_device(), config.quantised()
    if config.loss in (None, EXACT) or attached.offload is None:
        return quantised, "asked for" if quantised is not None else ""
    size = {"height": defaults.height, "width": defaults.width, "frames": defaults.num_frames}
    how: dict[str, Any] = {"dtype": dtype, "loss": config.loss, "device": device, "attached": attached}
    made = make_plan(str(folder), attached.offload, size | {"batch": config.max_batch}, **how)
    return None if made.taken == EXACT else Quantization.read(made.taken, device), made.why
