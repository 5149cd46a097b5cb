"""LoRA adapters: registered by name when an engine starts, and switched on and off by requests.

diffusers loads them into the pipeline before anything is attached to it, so that offload counts their bytes. A switch
reads no file and moves no weights.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.nn import Linear, Module

from ..core.adapters import adapter_layers, switch_adapters
from ..core.errors import ModelError, SettingError
from ..core.files import brief, heard, reading
from ..hooks import Handle
from .models import HUB_NAME, downloading
from .request import Adapter

LoraSetting = Mapping[str, str | Path] | None
_HUB_NAME = re.compile(rf"({HUB_NAME.pattern})(?:/(.+\.safetensors))?")
_FILE, _PEFT_FILE = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
"""The names under which diffusers and peft save adapters."""
_IGNORED = re.compile(r"unexpected keys|missing keys|dora_scale", re.IGNORECASE)
"""What diffusers warns of when it leaves out a part of an adapter."""


def read_sources(lora: Any) -> Any:
    """The setting, unless one of its adapters cannot be. Those of the hub are looked for later."""
    if not isinstance(lora, Mapping):
        raise ValueError
    for name, source in lora.items():
        if not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isprintable() or name != name.strip():
            raise ValueError(f"{brief(name)} is not a name.")
        _find(name, source)
    return lora


def _find(name: str, source: Any) -> Path | None:
    """The file of an adapter that is on this machine; None for one of the hub."""
    path = Path(source).expanduser() if isinstance(source, (str, Path)) else None
    if path is not None and path.is_file() and path.suffix == ".safetensors":
        return path
    if path is not None and path.is_dir():
        return _file_in(path, name)
    if path is not None and not path.exists() and _HUB_NAME.fullmatch(str(source)):
        return None
    raise SettingError(
        f"lora: {name!r} is {brief(source)}, which is not a .safetensors file, a folder with one, or an adapter of the "
        "hub such as 'owner/name' or 'owner/name/file.safetensors'.",
        param="lora",
    )


def _file_in(folder: Path, name: str) -> Path:
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if _FILE in found or len(found) == 1:
        return folder / (_FILE if _FILE in found else found[0])
    problem = f"has {', '.join(map(repr, found[:5]))}" if found else "has no .safetensors file"
    raise SettingError(f"lora: {name!r}: the folder {str(folder)!r} {problem}. Name one file.", param="lora")


def fetch_adapter(name: str, source: str | Path) -> Path:
    """The file of an adapter. One of the hub comes from the local cache, or is downloaded."""
    file, match = _find(name, source), _HUB_NAME.fullmatch(str(source))
    if file is not None or match is None:
        assert file is not None, "what is neither here nor a name of the hub is refused"
        return file
    import huggingface_hub as hub

    with downloading(f"The adapter {name!r}, {str(source)!r},"):
        if match[2] is not None:
            return Path(hub.hf_hub_download(match[1], match[2]))
        return _file_in(Path(hub.snapshot_download(match[1], allow_patterns=["*.safetensors"])), name)


class Adapters(Handle):
    """The adapters of a pipeline, and the handle that takes them off."""

    def __init__(self, pipeline: Any, sources: Mapping[str, str | Path]) -> None:
        """Load all of them: one that does not fit the model is refused now, and not by a request."""
        super().__init__()
        _check_pipeline(pipeline)
        files = {name: fetch_adapter(name, source) for name, source in sources.items()}
        self._inner = {name: f"samovar_{number}" for number, name in enumerate(files)}
        """What diffusers calls them: peft finds weights by this name, so it must be like no other."""
        self._used: tuple[Adapter, ...] | None = None
        with self._undo as undo:
            undo.callback(pipeline.unload_lora_weights)
            for name, file in files.items():
                _load(pipeline, name, file, self._inner[name])
            self._layers = adapter_layers(module for part in _parts(pipeline) for module in part.modules())
            self.use(())
            self._undo = undo.pop_all()

    def use(self, chosen: tuple[Adapter, ...]) -> None:
        """Switch these on, and all others off."""
        if chosen != self._used:
            before = [self._inner[name] for name, _ in self._used or ()]
            switch_adapters(self._layers, {self._inner[name]: scale for name, scale in chosen}, before)
            self._used = chosen


def _check_pipeline(pipeline: Any) -> None:
    if importlib.util.find_spec("peft") is None:
        raise SettingError("lora needs peft, which is not installed: pip install peft", param="lora")
    if not hasattr(pipeline, "load_lora_weights"):
        raise SettingError(f"{type(pipeline).__name__} takes no LoRA adapters. Leave out lora.", param="lora")
    there = sorted({name for names in pipeline.get_list_adapters().values() for name in names})
    if there:
        raise SettingError(
            f"This {type(pipeline).__name__} has adapters already: {', '.join(map(repr, there))}. Take them off first "
            "with pipe.unload_lora_weights(), and register all by lora.",
            param="lora",
        )


def _parts(pipeline: Any) -> list[Module]:
    return [part for part in pipeline.components.values() if isinstance(part, Module)]


def _load(pipeline: Any, name: str, file: Path, inner: str) -> None:
    """Load an adapter. Refused if it is for another model, or changes weights of the model itself."""
    what = f"The adapter {name!r}, {str(file)!r},"
    before = [(weight, weight._version) for part in _parts(pipeline) for weight in part.parameters()]
    with reading(what), _nothing_left_out(what), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # So it should be.
        _load_file(pipeline, file, inner)
    paths = [path for part in _parts(pipeline) for path, _ in part.named_parameters()]
    if not any(f".{inner}." in f"{path}." for path in paths):
        message = f"{what} has no weights for this {type(pipeline).__name__}. Is it for another model?"
        raise ModelError(message)
    there = {id(weight) for part in _parts(pipeline) for weight in part.parameters()}
    if any(id(weight) not in there or weight._version != version for weight, version in before):
        raise ModelError(
            f"{what} changes weights of the model itself, as control adapters do, so it cannot be switched off again. "
            "Load it into a pipeline of its own."
        )


@contextlib.contextmanager
def _nothing_left_out(what: str) -> Iterator[None]:
    """Refuse an adapter of which diffusers uses only a part: it says so in a warning alone."""
    with heard("diffusers") as said:
        yield
    for warning in filter(_IGNORED.search, said):
        raise ModelError(f"{what} does not fit this model: {brief(warning)}")


def _load_file(pipeline: Any, file: Path, inner: str) -> None:
    """Load an adapter as diffusers does."""
    where: dict[str, Any] = {"weight_name": file.name, "use_safetensors": True, "local_files_only": True}
    if file.name == _PEFT_FILE:
        raise ModelError(
            f"{file} is as peft saves adapters. Save it as diffusers does: pipe.save_lora_weights(FOLDER)."
        )
    if _is_packed_flux(pipeline):
        _load_into_packed_flux(pipeline, file.parent, inner, where)
    else:
        pipeline.load_lora_weights(file.parent, adapter_name=inner, **where)


def _is_packed_flux(pipeline: Any) -> bool:
    """Whether diffusers would compare an adapter with the shapes of weights that are packed into one dimension."""
    from diffusers.loaders import FluxLoraLoaderMixin

    if not isinstance(pipeline, FluxLoraLoaderMixin):
        return False
    return any(isinstance(layer, Linear) and layer.weight.ndim == 1 for layer in pipeline.transformer.modules())


def _load_into_packed_flux(pipeline: Any, folder: Path, inner: str, where: Mapping[str, Any]) -> None:
    """As `load_lora_weights` does, without the comparison, which only control adapters need; peft knows the shapes."""
    weights, alphas, metadata = pipeline.lora_state_dict(folder, return_alphas=True, return_lora_metadata=True, **where)
    given = {"network_alphas": alphas, "adapter_name": inner, "metadata": metadata, "_pipeline": pipeline}
    pipeline.load_lora_into_transformer(weights, transformer=pipeline.transformer, **given)
    pipeline.load_lora_into_text_encoder(
        weights, text_encoder=pipeline.text_encoder, prefix=pipeline.text_encoder_name, **given
    )
