"""What is this pipeline made of? Its denoisers, encoders and VAEs, and what must stay on the device.

A pipeline that declares its modules (`SupportsModuleOffload`) is taken at its word. Any other is read:
well-known attribute names first, then what diffusers itself lists as components.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch


@runtime_checkable
class SupportsModuleOffload(Protocol):
    """A pipeline that says which of its attributes hold what. Dotted paths are allowed.

    A fourth class variable, `_resident_modules`, is optional: modules inside a denoiser or beside it
    that are small, used all the time, and must never leave the device.
    """

    _dit_modules: ClassVar[Sequence[str]]
    _encoder_modules: ClassVar[Sequence[str]]
    _vae_modules: ClassVar[Sequence[str]]


@dataclass
class PipelineModules:
    """The modules of a pipeline by what they do, each with the path it was found under."""

    dits: list[torch.nn.Module] = field(default_factory=list)
    dit_names: list[str] = field(default_factory=list)
    encoders: list[torch.nn.Module] = field(default_factory=list)
    encoder_names: list[str] = field(default_factory=list)
    vaes: list[torch.nn.Module] = field(default_factory=list)
    vae_names: list[str] = field(default_factory=list)
    resident_modules: list[torch.nn.Module] = field(default_factory=list)
    resident_names: list[str] = field(default_factory=list)

    def roles(self) -> dict[str, tuple[list[str], list[torch.nn.Module]]]:
        """Names and modules of each role."""
        return {
            "denoiser": (self.dit_names, self.dits),
            "encoder": (self.encoder_names, self.encoders),
            "vae": (self.vae_names, self.vaes),
            "resident": (self.resident_names, self.resident_modules),
        }

    def add(self, role: str, name: str, module: torch.nn.Module) -> None:
        """Take a module in, unless it is there already under another name."""
        if not any(module is known for _, modules in self.roles().values() for known in modules):
            names, modules = self.roles()[role]
            names.append(name)
            modules.append(module)


_DECLARED = {
    "denoiser": "_dit_modules",
    "encoder": "_encoder_modules",
    "vae": "_vae_modules",
    "resident": "_resident_modules",
}
_WELL_KNOWN = {
    "denoiser": ("transformer", "transformer_2", "dit", "sr_dit", "language_model", "transformer_blocks", "model"),
    "encoder": ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "mllm", "vision_model"),
    "vae": ("vae", "audio_vae"),
}
_MISSING = object()


class ModuleDiscovery:
    """Finds a pipeline's modules."""

    @staticmethod
    def discover(pipeline: Any) -> PipelineModules:
        """The modules of a diffusers pipeline or of any object that holds modules as attributes."""
        found = PipelineModules()
        declared = isinstance(pipeline, SupportsModuleOffload)
        for role, name in _declared_names(pipeline) if declared else _scanned_names(pipeline):
            module = _resolve(pipeline, name)
            if isinstance(module, torch.nn.Module):
                found.add(role, name, module)
            elif declared:
                problem = "is not there" if module is _MISSING else f"is no torch.nn.Module but {module!r:.80}"
                warnings.warn(
                    f"{type(pipeline).__name__}.{_DECLARED[role]} names {name!r}, which {problem}. It is left "
                    "out. Correct the name, or load that component.",
                    stacklevel=2,
                )
        return found


def _declared_names(pipeline: Any) -> Iterator[tuple[str, str]]:
    for role, attribute in _DECLARED.items():
        for name in getattr(pipeline, attribute, ()):
            yield role, name


def _scanned_names(pipeline: Any) -> Iterator[tuple[str, str]]:
    for role, names in _WELL_KNOWN.items():
        for name in names:
            yield role, name
    components = getattr(pipeline, "components", None)
    if isinstance(components, Mapping):
        offload_order = (getattr(pipeline, "model_cpu_offload_seq", None) or "").split("->")
        for name in dict.fromkeys([*offload_order, *components]):
            if isinstance(components.get(name), torch.nn.Module):
                yield role_of(name, type(components[name])), name


def role_of(name: str, cls: type) -> str:
    """What a component does: by its name if that is well known, else by where its class comes from."""
    for role, names in _WELL_KNOWN.items():
        if name in names:
            return role
    library, _, room = cls.__module__.partition(".models.")
    if library == "diffusers" and room.startswith(("transformers.", "unets.")):
        return "denoiser"
    if room.startswith("autoencoders.") or any(word in name for word in ("vae", "vqvae", "movq", "vqgan")):
        return "vae"
    if library == "transformers" or "encoder" in name:
        return "encoder"
    return "resident"


def _resolve(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, _MISSING)
        if root is _MISSING:
            return _MISSING
    return root


def tensor_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Bytes of all parameters and buffers, those shared between modules counted once."""
    unique = {id(t): t for module in modules for tensors in (module.parameters(), module.buffers()) for t in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())
