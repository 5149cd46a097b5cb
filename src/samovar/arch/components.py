"""The modules of a pipeline by role: denoisers, encoders, VAEs, and those that must stay on the device.

A pipeline may declare its modules (`SupportsModuleOffload`). Any other is scanned: first the components that diffusers
itself lists, then well-known attribute names.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeGuard, get_args, runtime_checkable

from torch.nn import Module

from ..core.errors import DeclarationError, ModelError
from .modules import is_container, unwrapped

Role = Literal["denoiser", "encoder", "vae", "resident"]


@runtime_checkable
class SupportsModuleOffload(Protocol):
    """A pipeline that declares which attributes hold its modules. Dotted paths are allowed.

    A fourth class variable, `_resident_modules`, is optional: small modules inside a denoiser or beside it that are
    used all the time and must never leave the device.
    """

    _dit_modules: ClassVar[Sequence[str]]
    _encoder_modules: ClassVar[Sequence[str]]
    _vae_modules: ClassVar[Sequence[str]]


@dataclass
class PipelineModules:
    """The modules of a pipeline by role, each with the path at which it was found."""

    dits: list[Module] = field(default_factory=list)
    dit_names: list[str] = field(default_factory=list)
    encoders: list[Module] = field(default_factory=list)
    encoder_names: list[str] = field(default_factory=list)
    vaes: list[Module] = field(default_factory=list)
    vae_names: list[str] = field(default_factory=list)
    resident_modules: list[Module] = field(default_factory=list)
    resident_names: list[str] = field(default_factory=list)

    def roles(self) -> dict[Role, tuple[list[str], list[Module]]]:
        """Names and modules of each role."""
        lists = list(vars(self).values())
        return dict(zip(get_args(Role), zip(lists[1::2], lists[::2], strict=True), strict=True))


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
_ROLE_BY_NAME = {name: role for role, names in _WELL_KNOWN.items() for name in names}
_ROLE_BY_WORD: dict[str, Role] = {"unet": "denoiser", "vae": "vae", "movq": "vae", "vqgan": "vae", "encoder": "encoder"}
_ROLE_BY_PACKAGE: dict[str, Role] = {
    "transformers.": "encoder",
    "diffusers.models.transformers.": "denoiser",
    "diffusers.models.unets.": "denoiser",
    "diffusers.models.autoencoders.": "vae",
    "diffusers.models.": "resident",
}
_REQUIRED = [attribute for role, attribute in _DECLARED.items() if role != "resident"]
_MISSING = object()


Found = Iterator[tuple[Role, str, Module]]
"""Modules with their role and name."""


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


def find_denoisers(pipeline: Any) -> dict[str, Module]:
    """The denoisers of a pipeline by name. A denoiser may be given itself."""
    if is_denoiser_itself(pipeline):
        return {type(unwrapped(pipeline)).__name__: pipeline}
    found = ModuleDiscovery.discover(pipeline)
    denoisers = dict(zip(found.dit_names, found.dits, strict=True))
    if not denoisers:
        raise ModelError(
            f"No denoiser was found in {type(pipeline).__name__}. Expected a component such as 'transformer', or a "
            "declaration in _dit_modules."
        )
    return denoisers


def is_denoiser_itself(pipeline: Any) -> TypeGuard[Module]:
    """Whether this is a module that is called once a step, and not a pipeline that is a module.

    The names of its parts are no evidence: many denoisers hold their trunk as `transformer` or `model`. A pipeline
    declares its modules, or holds something that a denoiser does not need: a scheduler, a VAE, an encoder.
    """
    if not isinstance(pipeline, Module):
        return False
    bare = unwrapped(pipeline)
    if any(_read(bare, attribute) is not _MISSING for attribute in (*_REQUIRED, "components")):
        return False
    parts = [(role, module) for role, _, module in _well_known(bare)]
    if type(bare).forward is Module.forward and "forward" not in vars(bare):  # Nobody calls it.
        return all(is_container(module) for _, module in parts)
    has_scheduler = any(callable(_read(value, "set_timesteps")) for value in vars(bare).values())
    return not has_scheduler and all(role == "denoiser" for role, _ in parts)


def _declares_all(pipeline: Any) -> bool:
    missing = [attribute for attribute in _REQUIRED if _read(pipeline, attribute) is _MISSING]
    if 0 < len(missing) < len(_REQUIRED):
        warnings.warn(
            f"{type(pipeline).__name__} declares some of its modules but not {', '.join(missing)}. The declaration is "
            "ignored and the attributes are scanned instead. Declare all three; an empty list means none.",
            stacklevel=3,
        )
    return not missing


def _declared(pipeline: Any) -> Found:
    """The modules that a pipeline declares; a module under two names once."""
    taken: set[Module] = set()
    for role, attribute in _DECLARED.items():
        for name in _declared_names(pipeline, attribute):
            module = functools.reduce(_read, name.split("."), pipeline)
            if not isinstance(module, Module):
                problem = "does not exist" if module is _MISSING else f"is {module!r:.80}, not a torch.nn.Module"
                warnings.warn(
                    f"{type(pipeline).__name__}.{attribute} names {name!r}, which {problem}. It is ignored. Correct "
                    "the name, or load that component.",
                    stacklevel=3,
                )
            elif module not in taken:
                taken.add(module)
                yield role, name, module


def _declared_names(pipeline: Any, attribute: str) -> Sequence[str]:
    names = getattr(pipeline, attribute, None)
    if names is None:
        return ()
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        example = [names] if isinstance(names, str) else ["transformer"]
        raise DeclarationError(
            f"{type(pipeline).__name__}.{attribute} is {names!r}; expected a list of attribute names, "
            f"such as {example!r}."
        )
    return names


def _scanned(pipeline: Any) -> Found:
    """The modules that a pipeline holds. If one of two modules is inside the other, only the first counts."""
    taken: set[Module] = set()
    inside: set[Module] = set()
    for role, name, module in (*_components(pipeline), *_well_known(pipeline)):
        if module not in inside and taken.isdisjoint(module.modules()):
            taken.add(module)
            inside.update(module.modules())
            yield role, name, module


def _components(pipeline: Any) -> Found:
    """The components that diffusers lists, in the order in which they run."""
    components, sequence = _read(pipeline, "components"), _read(pipeline, "model_cpu_offload_seq")
    if not isinstance(components, Mapping):
        return
    offload_order = sequence.split("->") if isinstance(sequence, str) else []
    for name in dict.fromkeys([*offload_order, *components]):
        module = components.get(name)
        if isinstance(name, str) and isinstance(module, Module):
            yield role_of(name, type(unwrapped(module))), name, module


def _well_known(pipeline: Any) -> Found:
    for name, role in _ROLE_BY_NAME.items():
        module = _read(pipeline, name)
        if isinstance(module, Module):
            yield role, name, module


def role_of(name: str, cls: type) -> Role:
    """The role of a component: by the package of its class if that is known, otherwise by its name."""
    for package, role in _ROLE_BY_PACKAGE.items():
        if f"{cls.__module__}.".startswith(package):
            # An adapter may live in the package of the models that it is for.
            return "resident" if "Adapter" in cls.__name__ and package != "transformers." else role
    if name in _ROLE_BY_NAME:
        return _ROLE_BY_NAME[name]
    return next((role for word, role in _ROLE_BY_WORD.items() if word in name), "resident")


def _read(owner: Any, name: str) -> Any:
    """An attribute; `_MISSING` if there is none, or if its property raises because the pipeline is not set up."""
    with contextlib.suppress(Exception):  # Of any kind: it is somebody else's property.
        return getattr(owner, name)
    return _MISSING
