"""Where is a model, is it safe to load, and how is it loaded?

Weights are read from safetensors alone: the other formats can run code. So can a model that brings Python files; they
are used only if the user says `trust_remote_code=True`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from ..errors import ModelError, nearest
from ..files import read_json

if TYPE_CHECKING:
    import torch

INDEX = "model_index.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOADING = threading.Lock()
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def find_model(model: str) -> Path | None:
    """The folder of a model, which comes with Samovar or is here in diffusers format; None for a name of the hub."""
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
        f"{model!r} is neither a model that comes with Samovar, nor a folder with a {INDEX}, nor a name of the hub, "
        f"such as 'owner/name'. {nearest(model, BUILTIN_MODELS)}"
    )


def fetch_model(model: str, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model; one of the hub is taken from the local cache, or downloaded."""
    folder = find_model(model)
    if folder is not None:
        return folder
    diffusers = load_diffusers()
    try:
        found = diffusers.DiffusionPipeline.download(model, use_safetensors=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:  # How the hub's client says that it is not there, or cannot be reached.
        raise ModelError(
            f"{model!r} is no folder here and could not be had from the hub: {_first_line(error)} Check the name and "
            f"the network, or download it elsewhere: hf download {model} --local-dir FOLDER"
        ) from error
    return Path(found)


def check_model(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The index of a model, if it can be loaded without running what it brings."""
    index = read_json(folder / INDEX)
    if not trust_remote_code:
        _refuse_code(folder, index)
    for part in (folder / name for name in index if not name.startswith("_")):
        weights = [file for file in sorted(part.glob("*")) if file.suffix in (*_PICKLED, ".safetensors")]
        if weights and not any(file.suffix == ".safetensors" for file in weights):
            raise ModelError(
                f"{weights[0]} is a pickle, which can run code when it is read, and there are no .safetensors beside "
                "it. Samovar reads nothing else: convert the model, for example with save_pretrained of a pipeline "
                "that you trust."
            )
    return index


def _refuse_code(folder: Path, index: dict[str, Any]) -> None:
    """Refuse classes that are defined in the folder itself."""
    named = index.get("_class_name")
    own = [str(folder / f"{named[0]}.py")] if isinstance(named, list) and named else []
    own += [
        str(folder / name / f"{value[0]}.py")
        for name, value in index.items()
        if isinstance(value, list) and value and (folder / name / f"{value[0]}.py").is_file()
    ]
    if own:
        raise ModelError(
            f"{folder / INDEX} asks for code that comes with the model: {', '.join(own)}. Read it, and if you trust "
            "it, say so: trust_remote_code=True."
        )


@contextlib.contextmanager
def without_remote_code() -> Iterator[None]:
    """As if DIFFUSERS_DISABLE_REMOTE_CODE were set. The variable itself is read once, when diffusers is imported, and
    would hold for everything else that this process ever loads."""
    from diffusers.utils import dynamic_modules_utils as switches

    name = "DIFFUSERS_DISABLE_REMOTE_CODE"
    with _LOADING:  # What another thread restores must be what was there before.
        before = getattr(switches, name, False)
        setattr(switches, name, True)
        try:
            yield
        finally:
            setattr(switches, name, before)


def load_diffusers() -> Any:
    """diffusers, with its advice and its bars off, which are for people who load models by hand."""
    import diffusers
    import transformers

    for logging in (transformers.utils.logging, diffusers.utils.logging):
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    return diffusers


def find_loader(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The class that a folder's index names. Importing it takes most of the time until the first picture."""
    index = check_model(folder, trust_remote_code=trust_remote_code)
    diffusers = load_diffusers()
    name = index.get("_class_name")
    loader = getattr(diffusers, name, None) if isinstance(name, str) else None
    if isinstance(name, list):
        loader = diffusers.DiffusionPipeline  # It finds the class in the folder.
    if loader is None:
        raise ModelError(
            f"{folder / INDEX} is of class {name!r}, which diffusers {diffusers.__version__} does not have. Upgrade "
            "diffusers, or check the file."
        )
    return loader


def load_pipeline(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The pipeline of a folder, on the host."""
    loader = find_loader(folder, trust_remote_code=trust_remote_code)
    given = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": trust_remote_code}
    guard = contextlib.nullcontext() if trust_remote_code else without_remote_code()
    with guard, warnings.catch_warnings():
        # diffusers renamed the argument; both names work from 0.42 on, and only the old one before.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        try:
            return loader.from_pretrained(folder, torch_dtype=dtype, **given)
        except (OSError, ValueError) as error:  # A part that is missing or does not fit.
            raise ModelError(f"{folder} cannot be loaded: {_first_line(error)} Check its files.") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".") + "."
