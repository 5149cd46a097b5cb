"""Where is a model, is it safe to load, and how is it loaded?

Samovar only reads safetensors: other weight formats can run code. Python files that come with a model run only with
`trust_remote_code=True`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from ..errors import ModelError, nearest
from ..files import read_json
from .quantize import Quantization, check_saved, loading_arguments

if TYPE_CHECKING:
    import torch

# OpenMP threads that spin while they wait starve each other when processes share cores: an image took ten times longer.
# torch reads this when it is first imported, here or in a worker process.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

INDEX = "model_index.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOADING = threading.Lock()
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = re.compile(r"(?:diffusion_pytorch_model|model)(?:\.([A-Za-z]\w*))?(?:-\d+-of-\d+)?\.safetensors")
"""Names of weight files; the group is the variant, such as fp16."""


def find_model(model: str) -> Path | None:
    """The folder of a model that is built in or here in diffusers format; None for a model of the hub."""
    if not isinstance(model, str):
        raise ModelError(f"model must be a name or a folder, not {model!r}.")
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    folder = Path(model).expanduser()
    if (folder / INDEX).is_file():
        return folder
    if _HUB_NAME.fullmatch(model) and not folder.is_dir():
        return None
    raise ModelError(
        f"{model!r} is not a built-in model, a folder with a {INDEX}, or a model of the hub such as 'owner/name'. "
        f"{nearest(model, BUILTIN_MODELS)}"
    )


def fetch_model(model: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model. One of the hub comes from the local cache, or is downloaded."""
    folder = find_model(model)
    if folder is not None:
        return folder
    download = load_diffusers().DiffusionPipeline.download
    try:
        return Path(download(model, use_safetensors=True, trust_remote_code=trust_remote_code))
    except (OSError, ValueError) as error:  # Not there, or no network.
        parent = Path(model).expanduser().parent
        if parent.is_dir():
            here = sorted(folder.parent.name for folder in parent.glob(f"*/{INDEX}"))
            found = f" It has {', '.join(map(repr, here))}." if here else ""
            raise ModelError(f"There is no model {Path(model).name!r} in the folder {str(parent)!r}.{found}") from error
        raise ModelError(
            f"{model!r} is not a folder here and could not be downloaded from the hub: {_first_line(error)} Check the "
            f"name and the network, or download it elsewhere: hf download {model} --local-dir FOLDER"
        ) from error


def check_model(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The model's index, if the model can be loaded without running code from its folder."""
    index = read_json(folder / INDEX)
    if not trust_remote_code:
        _refuse_code(folder, index)
    for part in (folder / name for name in index if not name.startswith("_")):
        weights = [file for file in sorted(part.glob("*")) if file.suffix in (*_PICKLED, ".safetensors")]
        if weights and not any(file.suffix == ".safetensors" for file in weights):
            raise ModelError(
                f"{weights[0]} is a pickle, which can run code when it is read, and there are no .safetensors beside "
                "it. Convert the model, for example with save_pretrained of a pipeline that you trust."
            )
    return index


def _refuse_code(folder: Path, index: dict[str, Any]) -> None:
    """Refuse classes that are defined in the folder itself."""
    named = index.get("_class_name")
    files = [folder / f"{named[0]}.py"] if isinstance(named, list) and named else []
    parts = {name: value for name, value in index.items() if isinstance(value, list) and value}
    own = [folder / name / f"{value[0]}.py" for name, value in parts.items()]
    files += [file for file in own if file.is_file()]
    if files:
        raise ModelError(
            f"{folder / INDEX} asks for code that comes with the model: {', '.join(map(str, files))}. Read it, and if "
            "you trust it, pass trust_remote_code=True."
        )


@contextlib.contextmanager
def without_remote_code() -> Iterator[None]:
    """Set DIFFUSERS_DISABLE_REMOTE_CODE for now. diffusers reads the variable itself only once, on import."""
    from diffusers.utils import dynamic_modules_utils as switches

    name = "DIFFUSERS_DISABLE_REMOTE_CODE"
    with _LOADING:  # Otherwise one thread could restore another's value.
        before = getattr(switches, name, False)
        setattr(switches, name, True)
        try:
            yield
        finally:
            setattr(switches, name, before)


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


def find_loader(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The class that the folder's index names. Importing it takes most of the time until the first image."""
    index = check_model(folder, trust_remote_code=trust_remote_code)
    diffusers = load_diffusers()
    name = index.get("_class_name")
    if isinstance(name, list):
        return diffusers.DiffusionPipeline  # It finds the class in the folder.
    loader = getattr(diffusers, name, None) if isinstance(name, str) else None
    if loader is None:
        raise ModelError(
            f"{folder / INDEX} names the class {name!r}, which diffusers {diffusers.__version__} does not have. "
            "Upgrade diffusers, or check the file."
        )
    return loader


def load_pipeline(
    folder: Path,
    dtype: torch.dtype,
    *,
    trust_remote_code: bool = False,
    quantization: Quantization | None = None,
    components: Mapping[str, Any] | None = None,
) -> Any:
    """The pipeline of a folder, on the host; what bitsandbytes quantises, on the GPU. `components` need no loading."""
    loader = find_loader(folder, trust_remote_code=trust_remote_code)
    check_saved(folder, read_json(folder / INDEX))
    given: dict[str, Any] = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": trust_remote_code}
    given |= components or {}
    if quantization is not None:
        given |= loading_arguments(folder, dtype, quantization)
    guard = contextlib.nullcontext() if trust_remote_code else without_remote_code()
    with guard, warnings.catch_warnings():
        # diffusers 0.42 renamed the argument, and older versions only know this name.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        try:
            return loader.from_pretrained(folder, torch_dtype=dtype, variant=find_variant(folder), **given)
        except (OSError, ValueError) as error:  # A part that is missing or does not fit.
            raise ModelError(f"{folder} cannot be loaded: {_first_line(error)} Check its files.") from error
        except ImportError as error:  # Such as the library by which a part is quantised.
            raise ModelError(f"{folder} needs a package that is not installed: {_first_line(error)}") from error


def find_variant(folder: Path) -> str | None:
    """The variant to load, such as "fp16", if some part of the model comes in no other; else None."""
    found: dict[Path, set[str | None]] = {}
    for file in folder.glob("*/*.safetensors"):
        if match := _WEIGHTS.fullmatch(file.name):
            found.setdefault(file.parent, set()).add(match.group(1))
    only = {min(variants, key=str) for variants in found.values() if None not in variants}
    if len(only) > 1:
        raise ModelError(f"{folder} mixes the variants {', '.join(sorted(map(str, only)))}. Keep one of them.")
    return only.pop() if only else None


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a setting; "auto" is bfloat16 on GPUs."""
    import torch

    auto = "float32" if device.type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, auto if name == "auto" else name)
    return dtype


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".") + "."
