"""ControlNets that guide a model: folders beside the model's own, for the pipeline of its family that takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..arch.folder import check_files
from ..arch.modular import ModularCall
from ..core.errors import SettingError
from ..core.files import brief, index_file, read_json
from .hub import HUB_NAME, downloading

TASK = "controlnet"
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]


def read_controlnets(setting: Any) -> tuple[str, ...]:
    """The folders and names on the hub; ValueError for what is neither."""
    sources = [setting] if isinstance(setting, (str, Path)) else setting
    if not isinstance(sources, Sequence) or not sources or not all(isinstance(one, (str, Path)) for one in sources):
        raise ValueError
    for folder in (Path(source).expanduser() for source in sources):
        if index_file(folder).is_file():
            raise ValueError(f"{str(folder)!r} is a whole pipeline. Give it as the model, or {str(folder / TASK)!r}.")
        if not (folder / "config.json").is_file() and (folder.is_dir() or not HUB_NAME.fullmatch(str(folder))):
            raise ValueError(f"{str(folder)!r} has no config.json of a ControlNet.")
    return tuple(map(str, sources))


def controlled_class(cls: Any) -> Any:
    """The pipeline like this one that a ControlNet guides, by diffusers' names."""
    import diffusers

    name = re.sub(r"(?<!ControlNet)(Img2Img|Inpaint|)Pipeline$", r"ControlNet\1Pipeline", cls.__name__)
    if "controlnet" in getattr(cls, "kinds", ()) or "ControlNet" in cls.__name__:
        return cls
    if not hasattr(diffusers, name):
        message = f"diffusers has no {name}, which a ControlNet would guide. Leave out controlnet."
        raise SettingError(message, param="controlnet")
    return getattr(diffusers, name)


def fetch_controlnets(sources: Sequence[str]) -> list[Path]:
    """Their folders. Those of the hub come from the local cache, or are downloaded."""
    import huggingface_hub as hub

    folders = []
    for source in sources:
        folder = Path(source).expanduser()
        with downloading(f"controlnet={source!r}"):
            folders.append(folder if folder.is_dir() else Path(hub.snapshot_download(source, allow_patterns=_FILES)))
    return folders


def load_controlnets(folders: Sequence[Path], cls: Any, dtype: torch.dtype) -> Any:
    """The ControlNet, or a list of several, for a pipeline of this class."""
    kinds = [cls.kinds[TASK]] if issubclass(cls, ModularCall) else cls._get_signature_types()[TASK]
    expected = {kind.__name__: kind for kind in kinds if hasattr(kind, "from_config") and "Multi" not in kind.__name__}
    names = [read_json(folder / "config.json").get("_class_name") for folder in folders]
    for folder, name in zip(folders, names, strict=True):  # All of them before weights are read.
        if name not in expected:
            message = (
                f"controlnet={str(folder)!r} is a {brief(name)}, and {cls.__name__} takes a {' or a '.join(expected)}."
            )
            raise SettingError(message, param="controlnet")
        check_files(folder, folder, TASK)
    how = {"torch_dtype": dtype, "use_safetensors": True, "local_files_only": True}
    made = [expected[name].from_pretrained(folder, **how) for folder, name in zip(folders, names, strict=True)]
    return made[0] if len(made) == 1 else made
