"""What is this pipeline made of? Its denoisers, encoders and VAEs, and what must stay on the device.

A pipeline that declares its modules (`SupportsModuleOffload`) is taken at its word. Any other is read:
what diffusers itself lists as components first, then well-known attribute names.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, runtime_checkable

import torch

from ..errors import DeclarationError, ModelError
from .modules import is_container, unwrapped

Role = Literal["denoiser", "encoder", "vae", "resident"]


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

    def roles(self) -> dict[Role, tuple[list[str], list[torch.nn.Module]]]:
        """Names and modules of each role."""
        return {
            "denoiser": (self.dit_names, self.dits),
            "encoder": (self.encoder_names, self.encoders),
            "vae": (self.vae_names, self.vaes),
            "resident": (self.resident_names, self.resident_modules),
        }


_DECLARED: dict[Role, str] = {
    "denoiser": "_dit_modules",
    "encoder": "_encoder_modules",
    "vae": "_vae_modules",
    "resident": "_resident_modules",
}
_WELL_KNOWN: dict[Role, tuple[str, ...]] = {
    "denoiser": ("transformer", "transformer_2", "dit", "sr_dit", "language_model", "transformer_blocks", "model"),
    "encoder": ("text_encoder", "text_encoder_2", "text_encoder_3", "image_encoder", "mllm", "vision_model"),
    "vae": ("vae", "audio_vae"),
}
_TELLING_WORDS: dict[Role, tuple[str, ...]] = {
    "denoiser": ("unet",),
    "vae": ("vae", "movq", "vqgan"),
    "encoder": ("encoder",),
}
_ROOMS_OF_DIFFUSERS: dict[str, Role] = {
    "models.transformers.": "denoiser",
    "models.unets.": "denoiser",
    "models.autoencoders.": "vae",
    "models.": "resident",
}
_MISSING = object()


class ModuleDiscovery:
    """Finds a pipeline's modules."""

    @staticmethod
    def discover(pipeline: Any) -> PipelineModules:
        """The modules of a diffusers pipeline or of any object that holds modules as attributes."""
        found = PipelineModules()
        roles = found.roles()
        for role, name, module in _declared(pipeline) if _declares_all(pipeline) else _scanned(pipeline):
            names, modules = roles[role]
            names.append(name)
            modules.append(module)
        return found


def find_denoisers(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The denoisers of a pipeline by name, or the one that was given itself."""
    if is_denoiser_itself(pipeline):
        return {type(unwrapped(pipeline)).__name__: pipeline}
    found = ModuleDiscovery.discover(pipeline)
    denoisers = dict(zip(found.dit_names, found.dits, strict=True))
    if not denoisers:
        raise ModelError(
            f"No denoiser was found in {type(pipeline).__name__}: a component such as 'transformer' was looked for, "
            "or a declaration in _dit_modules."
        )
    return denoisers


def is_denoiser_itself(pipeline: Any) -> TypeGuard[torch.nn.Module]:
    """Whether this is a module that is called once a step, and no pipeline that is a module.

    What it calls its parts says nothing: many a denoiser holds its trunk as `transformer` or `model`. A pipeline
    declares its modules, or holds what a denoiser has no use for: a scheduler, a VAE, an encoder.
    """
    if not isinstance(pipeline, torch.nn.Module):
        return False
    bare = unwrapped(pipeline)
    declared = (attribute for role, attribute in _DECLARED.items() if role != "resident")
    if any(_read(bare, attribute) is not _MISSING for attribute in (*declared, "components")):
        return False
    parts = [(role, module) for role, _, module in _well_known(bare)]
    if type(bare).forward is torch.nn.Module.forward and "forward" not in vars(bare):  # Nobody calls it.
        return all(is_container(module) for _, module in parts)
    has_scheduler = any(callable(_read(value, "set_timesteps")) for value in vars(bare).values())
    return not has_scheduler and all(role == "denoiser" for role, _ in parts)


def _declares_all(pipeline: Any) -> bool:
    if isinstance(pipeline, SupportsModuleOffload):
        return True
    required = [attribute for role, attribute in _DECLARED.items() if role != "resident"]
    missing = [attribute for attribute in required if _read(pipeline, attribute) is _MISSING]
    if len(missing) < len(required):
        warnings.warn(
            f"{type(pipeline).__name__} declares some of its modules but not {', '.join(missing)}. Its declaration is "
            "not used and its attributes are scanned instead. Declare all three; an empty list means none.",
            stacklevel=3,
        )
    return False


def _declared(pipeline: Any) -> Iterator[tuple[Role, str, torch.nn.Module]]:
    """What a pipeline declares, at its word; a module under two names once."""
    taken: set[int] = set()
    for role, attribute in _DECLARED.items():
        for name in _declared_names(pipeline, attribute):
            module = _resolve(pipeline, name)
            if not isinstance(module, torch.nn.Module):
                problem = "is not there" if module is _MISSING else f"is no torch.nn.Module but {module!r:.80}"
                warnings.warn(
                    f"{type(pipeline).__name__}.{attribute} names {name!r}, which {problem}. It is left out. Correct "
                    "the name, or load that component.",
                    stacklevel=3,
                )
            elif id(module) not in taken:
                taken.add(id(module))
                yield role, name, module


def _declared_names(pipeline: Any, attribute: str) -> Sequence[str]:
    names = getattr(pipeline, attribute, None)
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        example = [names] if isinstance(names, str) else ["transformer"]
        raise DeclarationError(
            f"{type(pipeline).__name__}.{attribute} is {names!r}; a list of attribute names was expected, "
            f"such as {example!r}."
        )
    return names


def _scanned(pipeline: Any) -> Iterator[tuple[Role, str, torch.nn.Module]]:
    """What a pipeline holds; of two modules one of which is inside the other, the first."""
    taken: set[int] = set()
    inside: set[int] = set()
    for role, name, module in (*_components(pipeline), *_well_known(pipeline)):
        parts = set(map(id, module.modules()))
        if id(module) not in inside and taken.isdisjoint(parts):
            taken.add(id(module))
            inside |= parts
            yield role, name, module


def _components(pipeline: Any) -> Iterator[tuple[Role, str, torch.nn.Module]]:
    """What diffusers lists, in the order in which it runs."""
    components = _read(pipeline, "components")
    if not isinstance(components, Mapping):
        return
    sequence = _read(pipeline, "model_cpu_offload_seq")
    offload_order = sequence.split("->") if isinstance(sequence, str) else []
    for name in dict.fromkeys([*offload_order, *components]):
        module = components.get(name)
        if isinstance(name, str) and isinstance(module, torch.nn.Module):
            yield role_of(name, type(unwrapped(module))), name, module


def _well_known(pipeline: Any) -> Iterator[tuple[Role, str, torch.nn.Module]]:
    for role, names in _WELL_KNOWN.items():
        for name in names:
            module = _read(pipeline, name)
            if isinstance(module, torch.nn.Module):
                yield role, name, module


def role_of(name: str, cls: type) -> Role:
    """What a component does: by where its class comes from if that tells, else by its name."""
    library, _, place = cls.__module__.partition(".")
    if library == "transformers":
        return "encoder"
    for room, role in _ROOMS_OF_DIFFUSERS.items():
        if library == "diffusers" and place.startswith(room):
            # An adapter may live in the room of the models that it is for.
            return "resident" if "Adapter" in cls.__name__ else role
    for role, names in _WELL_KNOWN.items():
        if name in names:
            return role
    for role, words in _TELLING_WORDS.items():
        if any(word in name for word in words):
            return role
    return "resident"


def _resolve(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = _read(root, name)
    return root


def _read(owner: Any, name: str) -> Any:
    """An attribute; `_MISSING` if there is none, or if its property raises because the pipeline is not set up."""
    try:
        return getattr(owner, name, _MISSING)
    except (ImportError, LookupError, RuntimeError, ValueError):
        return _MISSING
