"""Which packages quantise weights, and what they have written on models, modules and tensors.

As in `interop`, names that belong to no type stand in this file and nowhere else.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Quantiser(NamedTuple):
    """A package that quantises weights."""

    package: str
    """As Python imports it."""
    requirement: str
    """As pip installs it."""

    def problem(self) -> str:
        """Why it cannot be used here: it is not installed, or too old; empty if it can."""
        from packaging.requirements import Requirement

        wanted = Requirement(self.requirement)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            return "which is not installed"
        is_enough = wanted.specifier.contains(version, prereleases=True)
        return "" if is_enough else f"of which {version} is installed, and {wanted.specifier} is needed"


QUANTISERS = {
    "torchao": Quantiser("torchao", "torchao>=0.17"),
    "bitsandbytes": Quantiser("bitsandbytes", "bitsandbytes>=0.49"),
    "gguf": Quantiser("gguf", "gguf>=0.17"),
    "quanto": Quantiser("optimum.quanto", "optimum-quanto>=0.2.7"),
    "sdnq": Quantiser("sdnq", "sdnq>=0.2.2"),
}
"""By the method that a saved component names. What is required is what the extra "quantised" installs."""


def quantization_kind(settings: Any) -> str | None:
    """A `quantization_config` in a few words, such as "torchao Int8WeightOnlyConfig"; None if there is none."""
    if settings is None:
        return None
    values: Mapping[str, Any] = settings if isinstance(settings, Mapping) else getattr(settings, "to_dict", dict)()
    method = values.get("quant_method", getattr(settings, "quant_method", None))
    name = str(getattr(method, "value", method))
    chosen = values.get("quant_type")
    if isinstance(chosen, Mapping):  # torchao's: {"default": {"_type": ..., "_data": ...}}
        inner = chosen.get("default", chosen)
        chosen = inner.get("_type") if isinstance(inner, Mapping) else inner
    if values.get("load_in_4bit"):
        chosen = values.get("bnb_4bit_quant_type", "4 bit")
    elif values.get("load_in_8bit"):
        chosen = "int8"
    chosen = chosen or values.get("weights_dtype") or values.get("weights") or values.get("bits")
    return f"{name} {chosen}" if chosen else name


def quantised_as(model: torch.nn.Module) -> str | None:
    """How a loaded model of diffusers or transformers is quantised, in a few words; None if it is not."""
    settings = _entry(getattr(model, "config", None), "quantization_config")
    if settings is None:  # Of a single file, it is only here.
        settings = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
    return quantization_kind(settings)


def is_loadable_from_a_file(cls: type) -> bool:
    """Whether diffusers loads models of this class from single files."""
    from diffusers.loaders import single_file_model as loader

    return loader._get_single_file_loadable_mapping_class(cls) is not None


def left_out(cls: type, name: str) -> bool:
    """Whether a model's authors expect a tensor of this name in files, though the model does not have it."""
    patterns = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def converted_names(cls: type, model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a single file by the names of diffusers, as its `from_single_file` renames and splits them."""
    from diffusers.loaders import single_file_model as loader

    known = loader._get_single_file_loadable_mapping_class(cls)
    if not loader._should_convert_state_dict_to_diffusers(model.state_dict(), tensors):
        return tensors
    convert = loader.SINGLE_FILE_LOADABLE_CLASSES[known]["checkpoint_mapping_fn"]
    found: dict[str, torch.Tensor] = convert(config=dict(model.config), checkpoint=dict(tensors))
    return found


def _entry(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


# ------------------------------------------------------------------------------------------------ weights


def _int8_state(module: torch.nn.Module) -> Any:
    """Where an 8-bit layer of bitsandbytes keeps its weight and scales, which its first call takes from the weight;
    None for other layers."""
    state = vars(module).get("state")
    return state if type(state).__name__ == "MatmulLtState" else None


def kept_beside_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors that belong to a module's weights and are no parameters."""
    state = _int8_state(module)
    return [] if state is None else [tensor for tensor in (state.CB, state.SCB) if tensor is not None]


def begin_state(module: torch.nn.Module) -> None:
    """Have an 8-bit layer fill its state now: its twin would take it from the weight that they share."""
    if _int8_state(module) is not None and getattr(module._parameters.get("weight"), "CB", None) is not None:
        module.init_8bit_state()  # type: ignore[operator]


def move_beside_weights(module: torch.nn.Module, device: torch.device) -> None:
    """Have the state of an 8-bit layer hold its tensors on another device."""
    state = _int8_state(module)
    for name in ("CB", "SCB") if state is not None else ():
        if getattr(state, name) is not None:
            setattr(state, name, getattr(state, name).to(device))


def is_untraceable(tensor: torch.Tensor) -> bool:
    """Whether torch.compile fails on a quantised weight: on those of GGUF, and on some 4-bit ones of quanto."""
    return type(tensor).__name__ in ("GGUFParameter", "TinyGemmWeightQBitsTensor")


def is_packed_for_cpu(tensor: torch.Tensor) -> bool:
    """Whether a 4-bit weight is packed for a CPU, so that no other device can read it: by bitsandbytes in its first
    call there, by torchao when it was quantised there."""
    by_call = getattr(vars(tensor).get("quant_state"), "packing_format_for_cpu", False)
    return bool(by_call) or type(tensor).__name__ == "Int4OpaqueTensor"
