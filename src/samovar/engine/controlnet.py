"""Which ControlNets guide a model? Folders beside the model's own, for the pipeline of its family that takes them."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..arch.folder import check_files
from ..arch.modular import ModularCall
from ..core.errors import ModelError, SettingError
from ..core.files import brief, first_line, index_file, read_json, reading
from ..core.interop import pipelines_by_task

ControlNetSetting = str | Path | Sequence[str | Path] | None

TASK = "controlnet"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json"]


def read_controlnets(setting: ControlNetSetting) -> tuple[str, ...]:
    """The folders and names on the hub; SettingError for what is neither."""
    if setting is None:
        return ()
    sources = [setting] if isinstance(setting, (str, Path)) else setting
    if not isinstance(sources, Sequence) or not sources or not all(isinstance(one, (str, Path)) for one in sources):
        message = f"controlnet={setting!r}; expected a folder or a name on the hub, or a list of them."
        raise SettingError(message, param="controlnet")
    for source in map(str, sources):
        folder = Path(source).expanduser()
        if index_file(folder).is_file():
            raise SettingError(
                f"controlnet={source!r} is a whole pipeline. Give it as the model; or give the folder of its "
                f"ControlNet, such as {str(folder / TASK)!r}.",
                param="controlnet",
            )
        is_name = HUB_NAME.fullmatch(source) and not folder.is_dir()
        if not is_name and not (folder / "config.json").is_file():
            message = (
                f"controlnet={source!r} is not a folder with the config.json of a ControlNet, or a name on the hub."
            )
            raise SettingError(message, param="controlnet")
    return tuple(map(str, sources))


def controlled_class(cls: Any, task: str | None) -> Any:
    """The pipeline of a class's family that a ControlNet guides: diffusers' table has it, or it has the usual name."""
    import diffusers

    tables, wanted = pipelines_by_task(), "text2img" if task in (None, TASK) else task
    if wanted == "text2img" and _kinds(cls):
        return cls
    families = {family for table in tables.values() for family, each in table.items() if each is cls}
    for family in sorted(family.removesuffix(f"-{TASK}") for family in families):
        table = tables.get(wanted or "", {})
        if f"{family}-{TASK}" in table:
            return table[f"{family}-{TASK}"]
        plain = table.get(family)
        name = plain and re.sub(r"(Img2Img|Inpaint|)Pipeline$", r"ControlNet\1Pipeline", plain.__name__)
        if name and hasattr(diffusers, name):
            return getattr(diffusers, name)
    found = getattr(diffusers, cls.__name__.replace("Pipeline", "ControlNetPipeline"), None)
    if wanted == "text2img" and found is not None:
        return found
    with_task = "" if wanted == "text2img" else f" for task={task!r}"
    message = f"diffusers has no pipeline like {cls.__name__} that a ControlNet guides{with_task}."
    raise SettingError(f"{message} Leave out controlnet.", param="controlnet" if task in (None, TASK) else "task")


def load_controlnets(sources: Sequence[str], cls: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The ControlNet, or several in one, for a pipeline of this class and the model in a folder."""
    together = [kind for kind in _kinds(cls) if "Multi" in getattr(kind, "__name__", "")]
    if len(sources) > 1 and not together:
        raise SettingError(f"{cls.__name__} takes one ControlNet, not {len(sources)}.", param="controlnet")
    found = [(source, _fetched(source)) for source in sources]
    for source, path in found:  # All of them before weights are read.
        _check_fits(source, read_json(path / "config.json"), cls, folder)
        check_files(path, path, TASK)
    made = [_loaded(source, path, cls, dtype) for source, path in found]
    return made[0] if len(made) == 1 else together[0](made)


def controlnet_bytes(sources: Sequence[str]) -> int:
    """The size of their files, which is about that of their weights."""
    return sum(file.stat().st_size for source in sources for file in _fetched(source).glob("*.safetensors"))


def _loaded(source: str, path: Path, cls: Any, dtype: torch.dtype) -> Any:
    kind = _expected(cls)[read_json(path / "config.json")["_class_name"]]
    with reading(f"The ControlNet in {source!r}"), warnings.catch_warnings():
        # diffusers 0.42 renamed the argument, and older versions only know this name.
        warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
        made = kind.from_pretrained(path, torch_dtype=dtype, use_safetensors=True, local_files_only=True)
    missing = [name for name, weight in made.named_parameters() if weight.is_meta]
    if missing:
        raise ModelError(f"The ControlNet in {source!r} lacks the weights {missing[0]!r}. Download it again.")
    return made


def _fetched(source: str) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    import huggingface_hub as hub

    try:
        return Path(hub.snapshot_download(source, allow_patterns=_FILES))
    except (OSError, ValueError) as error:  # Not there, or no network.
        raise ModelError(
            f"controlnet={source!r} is not a folder here and could not be downloaded from the hub: {first_line(error)} "
            "Check the name and the network."
        ) from error


def _kinds(cls: Any) -> tuple[Any, ...]:
    """What a pipeline takes as its ControlNet; nothing if it takes none."""
    if issubclass(cls, ModularCall):
        return (cls.kinds[TASK],) if TASK in cls.kinds else ()
    return tuple(cls._get_signature_types()[TASK]) if TASK in inspect.signature(cls).parameters else ()


def _expected(cls: Any) -> dict[str, Any]:
    """The classes of single ControlNets that a pipeline takes, by name."""
    return {
        kind.__name__: kind for kind in _kinds(cls) if hasattr(kind, "from_config") and "Multi" not in kind.__name__
    }


def _check_fits(source: str, config: dict[str, Any], cls: Any, folder: Path) -> None:
    """Refuse a ControlNet that is for another family, or for a model of another width."""
    name, expected = config.get("_class_name"), _expected(cls)
    if name not in expected:
        raise SettingError(
            f"controlnet={source!r} is a {brief(name)}, and {cls.__name__} takes a {' or a '.join(expected)}.",
            param="controlnet",
        )
    file = folder / "transformer" / "config.json"
    model = read_json(file) if file.is_file() else {}
    for setting in ("num_attention_heads", "attention_head_dim", "joint_attention_dim"):
        theirs, ours = config.get(setting), model.get(setting)
        if isinstance(theirs, int) and isinstance(ours, int) and theirs != ours:
            raise SettingError(
                f"controlnet={source!r} is for a model with {setting}={theirs}, and this one has {ours}. Give one that "
                "was trained for this model.",
                param="controlnet",
            )
