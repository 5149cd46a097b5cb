"""Weights that are quantised while they are loaded: the setting, what it needs, and what diffusers is given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..arch.gguf_file import read_gguf, stored_in
from ..arch.quantised import GROUP, KINDS, Kind, find_kind, layers_left, quantised_parts, spared_names
from ..arch.skeleton import Parts, read_skeleton
from ..core.errors import SettingError
from ..core.files import reading
from ..core.quantisers import QUANTISERS

QuantizationSetting = str | Path | Mapping[str, str | Path] | None
GGUF = ".gguf"
_DENOISERS = ""
"""Stands for all denoisers, which are what is quantised unless components are named."""


@dataclass(frozen=True)
class Quantization:
    """A checked setting."""

    kinds: Mapping[str, str]
    """Kinds and files that end in .gguf, by component."""

    @classmethod
    def read(cls, value: QuantizationSetting, device: torch.device | None) -> Quantization | None:
        """The setting, if everything that it needs is here; None for none. Without a device, it is only planned."""
        if value is None or value == "none":
            return None
        named = dict(value) if isinstance(value, Mapping) else {_DENOISERS: value}
        if not named or not all(isinstance(each, (str, Path)) for each in named.values()):
            raise SettingError(
                f"quantization={value!r}; expected a kind such as 'int8', a .gguf file, or either by component, such "
                "as {'transformer': 'int8'}.",
                param="quantization",
            )
        kinds = {name: str(each) for name, each in named.items() if each != "none"}
        for each in kinds.values():
            if each.endswith(GGUF):
                _check_file(each)
            elif device is None:
                find_kind(each)
            else:
                check_kind(each, device)
        return cls(kinds) if kinds else None

    @property
    def files(self) -> list[str]:
        """GGUF files among them."""
        return [each for each in self.kinds.values() if each.endswith(GGUF)]

    def by_component(self, parts: Parts) -> dict[str, str]:
        """Kinds and files by the name of a component of this model."""
        if _DENOISERS not in self.kinds:
            return dict(self.kinds)
        each = self.kinds[_DENOISERS]
        denoisers = [name for name, part in parts.items() if part.role == "denoiser"]
        if not denoisers:
            problem = f"is for a denoiser, and this model has none, only {', '.join(parts)}"
        elif each.endswith(GGUF) and len(denoisers) > 1:
            problem = f"is the file of one component, and this model has the denoisers {' and '.join(denoisers)}"
        else:
            return dict.fromkeys(denoisers, each)
        first = [*denoisers, *parts][0]
        raise SettingError(
            f"quantization={each!r} {problem}. Say which component it is for: {{{first!r}: {each!r}}} in Python, "
            f"{first}={each} in a command.",
            param="quantization",
        )

    def applied(self, parts: Parts) -> Parts:
        """Components that were read without weights, as they will be stored. Refused if they cannot be."""
        chosen = self.by_component(parts)
        found = quantised_parts(parts, {name: each for name, each in chosen.items() if each in KINDS})
        for name, each in chosen.items():
            if each.endswith(GGUF):
                found = stored_in(read_gguf(each), name, found)
        return found


def check_kind(name: str, device: torch.device) -> Kind:
    """A kind by its name, if it runs here."""
    kind = find_kind(name)
    if device.type not in kind.devices:
        raise SettingError(
            f"quantization={name!r} does not run on {device.type}: diffusers loads {kind.package} weights on a GPU "
            "only. Use 'int4', 'int8' or 'fp8' there.",
            param="quantization",
        )
    _check_package(kind.package, name)
    return kind


def _check_file(name: str) -> None:
    if not Path(name).expanduser().is_file():
        raise SettingError(f"quantization={name!r} is not a file here.", param="quantization")
    _check_package("gguf", name)


def _check_package(method: str, name: str) -> None:
    """Refuse a quantisation whose package is not here, or is too old."""
    quantiser = QUANTISERS[method]
    if problem := quantiser.problem():
        raise SettingError(
            f"quantization={name!r} needs {quantiser.package}, {problem}. Install it: "
            f"pip install '{quantiser.requirement}'",
            param="quantization",
        )


def loading_arguments(folder: Path, dtype: torch.dtype, quantization: Quantization) -> dict[str, Any]:
    """What `from_pretrained` of the pipeline in a folder is given. Everything is checked before weights are read."""
    _, parts = read_skeleton(str(folder))
    quantization.applied(parts)
    chosen = quantization.by_component(parts)
    configs = {
        name: _library_config(KINDS[each], parts[name].module, parts[name].cls, dtype)
        for name, each in chosen.items()
        if each in KINDS
    }
    given: dict[str, Any] = {
        name: _load_file(file, parts[name].cls, folder / name, dtype)
        for name, file in chosen.items()
        if file.endswith(GGUF)
    }
    if configs:
        from diffusers import PipelineQuantizationConfig

        given["quantization_config"] = PipelineQuantizationConfig(quant_mapping=configs)
    return given


def _library_config(kind: Kind, model: Any, cls: type, dtype: torch.dtype) -> Any:
    """The configuration by which diffusers or transformers quantises a component."""
    import diffusers
    import transformers

    left = layers_left(model)
    names = [f"{path}.weight" for path in left]
    is_encoder = cls.__module__.startswith("transformers.")
    library: Any = transformers if is_encoder else diffusers
    if kind.package == "torchao":
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        quantise = Int8WeightOnlyConfig() if kind.name == "int8" else Float8WeightOnlyConfig()
        # transformers takes names as patterns, and without the strokes as ends of names too.
        spared = [re.escape(name) for name in names] if is_encoder else names
        return library.TorchAoConfig(quantise, modules_to_not_convert=spared)
    if kind.package == "sdnq":
        from sdnq import SDNQConfig

        return SDNQConfig(
            weights_dtype="uint4",
            group_size=GROUP,
            dequantize_fp32=False,
            add_skip_keys=False,
            minimum_allowed_numel=1,
            minimum_allowed_channel_size=1,
            modules_to_not_convert=names,
        )
    return library.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=spared_names(model, left),
    )


def _load_file(file: str, cls: Any, config: Path, dtype: torch.dtype) -> Any:
    """A component from a GGUF file, by the configuration in the model's folder."""
    from diffusers import GGUFQuantizationConfig

    settings = GGUFQuantizationConfig(compute_dtype=dtype)
    path = str(Path(file).expanduser())
    with reading(f"The {cls.__name__} in {file!r}"):
        return cls.from_single_file(path, config=str(config), quantization_config=settings, torch_dtype=dtype)
