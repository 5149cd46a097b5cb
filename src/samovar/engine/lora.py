"""Which LoRA adapters are in a model, and which of them does a request use?

Adapters are registered by name when an engine starts, and a request only names them. diffusers loads them into the
pipeline before anything is attached to it, so that offload counts their bytes. A request switches them on and
off, which reads no file and moves no weights.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch.nn import Linear

from ..arch import find_denoisers
from ..core.adapters import adapter_layers, switch_adapters
from ..core.errors import ModelError, SettingError
from ..core.files import brief, check_names, first_line, heard, read_json, reading

LoraSetting = Mapping[str, str | Path] | None
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+\.safetensors))?")
_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""The names under which diffusers and peft save adapters."""
_PEFT_CONFIG, _PEFT_PREFIX = "adapter_config.json", "base_model.model."
_PEFT_SETTINGS = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora",
                  "lora_bias", "bias", "exclude_modules")  # fmt: skip
_IGNORED = re.compile(r"unexpected keys|missing keys|dora_scale", re.IGNORECASE)
"""What diffusers warns of when it leaves out a part of an adapter."""


class Adapter(NamedTuple):
    """An adapter that a request uses."""

    name: str
    scale: float = 1.0


def read_choice(lora: Any) -> tuple[Adapter, ...]:
    """The adapters that a request uses: a name, {"name": ..., "scale": ...}, or a list of these."""
    if lora is None:
        return ()
    several = [lora] if isinstance(lora, (str, Mapping, Adapter)) else lora
    if not isinstance(several, (list, tuple)):
        raise _refusal(lora)
    chosen = tuple(map(_read_one, several))
    names = [adapter.name for adapter in chosen]
    for name in names:
        if names.count(name) > 1:
            raise SettingError(f"lora: {brief(name)} is given twice. Give it once, with one scale.", param="lora")
    return chosen


def _read_one(one: Any) -> Adapter:
    if isinstance(one, Adapter):
        one = one._asdict()
    if isinstance(one, str):
        one = {"name": one}
    if not isinstance(one, Mapping) or not isinstance(one.get("name"), str):
        raise _refusal(one)
    check_names(one, Adapter._fields, "a part of an adapter in lora, which has a name and a scale", param="lora")
    scale = one.get("scale")
    scale = 1.0 if scale is None else scale
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not abs(scale) <= sys.float_info.max:
        raise SettingError(
            f"lora: the scale of {brief(one['name'])} must be a number, not {brief(scale)}.", param="lora"
        )
    return Adapter(one["name"], float(scale))


def _refusal(lora: Any) -> SettingError:
    message = f"lora={brief(lora)}; expected the name of an adapter, {{'name': ..., 'scale': ...}}, or a list of these."
    return SettingError(message, param="lora")


def check_sources(lora: Any) -> None:
    """Refuse adapters that cannot be, before anything is loaded. Those of the hub are looked for later."""
    if lora is None:
        return
    if not isinstance(lora, Mapping):
        message = f"lora={brief(lora)}; expected files or folders by name, such as {{'pixel': 'pixel.safetensors'}}."
        raise SettingError(message, param="lora")
    for name, source in lora.items():
        if not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isprintable() or name != name.strip():
            message = f"lora: {brief(name)} is not a name for an adapter. Expected one such as 'pixel'."
            raise SettingError(message, param="lora")
        find_adapter(name, source)


def find_adapter(name: str, source: Any) -> Path | None:
    """The file of an adapter that is on this machine; None for one of the hub."""
    if not isinstance(source, (str, Path)):
        raise SettingError(f"lora: {name!r} must be a file or a folder, not {brief(source)}.", param="lora")
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".safetensors":
        return path
    if path.is_dir():
        return _file_in(path, name)
    if not path.exists() and _HUB_NAME.fullmatch(str(source)):
        return None
    raise SettingError(
        f"lora: {name!r} is {str(source)!r}, which is not a .safetensors file, a folder with one, or an adapter of the "
        "hub such as 'owner/name' or 'owner/name/file.safetensors'.",
        param="lora",
    )


def _file_in(folder: Path, name: str) -> Path:
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    for file in _FILES if len(found) != 1 else found:
        if file in found:
            return folder / file
    problem = f"has {', '.join(map(repr, found[:5]))}" if found else "has no .safetensors file"
    raise SettingError(f"lora: {name!r}: the folder {str(folder)!r} {problem}. Name one file.", param="lora")


def fetch_adapter(name: str, source: str | Path) -> Path:
    """The file of an adapter. One of the hub comes from the local cache, or is downloaded."""
    file = find_adapter(name, source)
    match = _HUB_NAME.fullmatch(str(source))
    if file is not None or match is None:
        assert file is not None, "find_adapter refuses what is neither here nor a name of the hub"
        return file
    import huggingface_hub as hub

    try:
        if match[2] is not None:
            return Path(hub.hf_hub_download(match[1], match[2]))
        patterns = [*_FILES, _PEFT_CONFIG]
        folder = Path(hub.snapshot_download(match[1], allow_patterns=patterns))
        if not any((folder / file).is_file() for file in _FILES):
            folder = Path(hub.snapshot_download(match[1], allow_patterns=["*.safetensors", _PEFT_CONFIG]))
        return _file_in(folder, name)
    except (OSError, ValueError) as error:  # Not there, or no network.
        raise ModelError(
            f"The adapter {name!r}, {str(source)!r}, is not a file here and could not be downloaded from the hub: "
            f"{first_line(error)} Check the name and the network."
        ) from error


class Adapters:
    """The adapters of a pipeline: loaded once, kept within a budget, switched between requests."""

    def __init__(self, pipeline: Any, sources: Mapping[str, str | Path], budget: int | None = None) -> None:
        """Load all of them: one that does not fit the model is refused now, and not by a request. Beyond the budget,
        the first ones are dropped again."""
        self._pipeline, self._budget = pipeline, budget
        _check_pipeline(pipeline)
        self._files = {name: fetch_adapter(name, source) for name, source in sources.items()}
        self._inner = {name: f"samovar_{number}" for number, name in enumerate(sources)}
        """What diffusers calls them: peft finds weights by this name, so it must be like no other."""
        self.bytes: dict[str, int] = {}
        """The size of each."""
        self._seen: dict[str, tuple[int, int]] = {}
        """Size and time of each file: one that is replaced may overwrite weights of the model, and is not loaded."""
        self._loaded: list[str] = []
        """The least recently used first."""
        self._layers: list[Any] = []
        """Those of the model that have adapters."""
        self._used: tuple[Adapter, ...] | None = None
        """What is switched on; None if that is not known."""
        self._scaled: tuple[str, ...] = ()
        """Those that a request has given a scale, as diffusers calls them."""
        try:
            for name in sources:
                self._load(name)
            self.use(())
        except BaseException:
            self.close()
            raise

    @property
    def loaded_bytes(self) -> int:
        return sum(self.bytes[name] for name in self._loaded)

    def use(self, chosen: tuple[Adapter, ...]) -> None:
        """Switch these on, and all others off."""
        if chosen == self._used:
            return
        self._used = None
        names = [adapter.name for adapter in chosen]
        for name in names:
            if name in self._loaded:
                self._loaded.remove(name)
                self._loaded.append(name)
        for name in names:
            if name not in self._loaded:
                self._load(name, keep=names)
        scales = {self._inner[name]: scale for name, scale in chosen}
        switch_adapters(self._layers, scales, self._scaled)
        self._used, self._scaled = chosen, tuple(scales)

    def close(self) -> None:
        """Leave the pipeline as it was without adapters."""
        self._loaded, self._layers, self._used = [], [], None
        self._pipeline.unload_lora_weights()

    def _load(self, name: str, keep: list[str] | None = None) -> None:
        file = self._files[name]
        with reading(f"The adapter {name!r}, {str(file)!r},"):
            found = file.stat()
            if self._seen.setdefault(name, (found.st_size, found.st_mtime_ns)) != (found.st_size, found.st_mtime_ns):
                message = f"The adapter {name!r}, {str(file)!r}, has changed since it was registered."
                raise ModelError(f"{message} Restart to use the new one.")
        try:
            self.bytes[name] = size = self._load_and_check(name, file)
        except BaseException:
            self._drop(name)
            raise
        if self._budget is not None and size > self._budget:
            message = (
                f"lora_memory={self._budget} bytes is too little for the adapter {name!r}, which has {size} bytes."
            )
            raise SettingError(f"{message} Raise it.", param="lora_memory")
        self._make_room(size, keep or [])
        self._loaded.append(name)
        self._layers = _adapter_layers(self._pipeline)

    def _load_and_check(self, name: str, file: Path) -> int:
        """The adapter's bytes."""
        pipeline, inner = self._pipeline, self._inner[name]
        before = {id(tensor): (tensor, tensor._version) for tensor in _weights(pipeline)}
        with reading(f"The adapter {name!r}, {str(file)!r},"), _nothing_left_out(name, file), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # So it should be.
            _load_file(pipeline, file, inner)
        parts = [tensor for path, tensor in _named_weights(pipeline) if f".{inner}." in f"{path}."]
        if not parts:
            message = f"The adapter {name!r}, {str(file)!r}, has no weights for this {type(pipeline).__name__}."
            raise ModelError(f"{message} Is it for another model?")
        after = {id(tensor) for tensor in _weights(pipeline)}
        if any(key not in after or tensor._version != version for key, (tensor, version) in before.items()):
            raise ModelError(
                f"The adapter {name!r}, {str(file)!r}, changes weights of the model itself, as control adapters do, so "
                "it cannot be switched off again. Load it into a pipeline of its own."
            )
        return sum(tensor.numel() * tensor.element_size() for tensor in parts)

    def _drop(self, name: str) -> None:
        there = {inner for names in self._pipeline.get_list_adapters().values() for inner in names}
        if self._inner[name] in there:
            self._pipeline.delete_adapters([self._inner[name]])

    def _make_room(self, size: int, keep: list[str]) -> None:
        for name in [name for name in self._loaded if name not in keep]:
            if self._budget is None or self.loaded_bytes + size <= self._budget:
                return
            self._loaded.remove(name)
            self._drop(name)


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


def _load_file(pipeline: Any, file: Path, inner: str) -> None:
    """Load an adapter as diffusers does; what peft has saved goes to the denoiser."""
    config = file.parent / _PEFT_CONFIG
    if not (file.name == _FILES[1] and config.is_file()):
        where = {"weight_name": file.name, "use_safetensors": True, "local_files_only": True}
        if _is_packed_flux(pipeline):
            _load_into_packed_flux(pipeline, file.parent, inner, where)
        else:
            pipeline.load_lora_weights(file.parent, adapter_name=inner, **where)
        return
    from safetensors.torch import load_file

    settings = {name: value for name, value in read_json(config).items() if name in _PEFT_SETTINGS}
    weights = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in load_file(file).items()}
    denoiser: Any = next(iter(find_denoisers(pipeline).values()))
    denoiser.load_lora_adapter(weights, prefix=None, adapter_name=inner, metadata=settings)


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


def _adapter_layers(pipeline: Any) -> list[Any]:
    parts = [part for part in pipeline.components.values() if hasattr(part, "named_parameters")]
    return adapter_layers(module for part in parts for module in part.modules())


def _named_weights(pipeline: Any) -> Iterator[tuple[str, Any]]:
    for part in pipeline.components.values():
        if hasattr(part, "named_parameters"):
            yield from part.named_parameters()


def _weights(pipeline: Any) -> Iterator[Any]:
    return (tensor for _, tensor in _named_weights(pipeline))


@contextlib.contextmanager
def _nothing_left_out(name: str, file: Path) -> Iterator[None]:
    """Refuse an adapter of which diffusers uses only a part: it says so in a warning alone."""
    with heard("diffusers") as said:
        yield
    for warning in said:
        if _IGNORED.search(warning):
            raise ModelError(f"The adapter {name!r}, {str(file)!r}, does not fit this model: {brief(warning)}")
