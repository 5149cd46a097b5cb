"""Which of a denoiser's arguments is the sample, which the time, and which stay the same through a run?

A name is only a hint. What counts is how values behave from one step of a branch to the next: the sample and the time
change at every step, and so do residuals that are computed from the sample (a ControlNet's); conditioning stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import tree

Role = Literal["sample", "time", "residual", "conditioning"]
Leaves = Mapping[str, Any]
"""The tensors, numbers and other atoms of a call's arguments, by a dotted path that begins with the parameter."""

_SAMPLE = (
    "hidden_states", "audio_hidden_states", "sample", "latent", "latents", "audio_latents", "local_latents", "x", "img",
    "z", "x_t", "xt", "z_t", "zt", "latent_model_input", "model_input"
)  # fmt: skip
_TIME = ("sigma", "sigmas", "_time")
_TIMES = ("t", "ts", "time", "times", "sigma_t", "noise_level", "noise_levels")
_RESIDUAL = ("controlnet", "block_samples", "residual")
_CONDITIONING = (
    "encoder_hidden_states", "prompt", "text", "txt", "caption", "cap_feats", "embeds", "pooled", "class", "label",
    "mask", "ids", "guidance"
)  # fmt: skip
_ENOUGH = 2
"""Steps after which what was seen of an argument overrules its name."""


@functools.cache
def is_sample(parameter: str) -> bool:
    """Whether a denoiser's parameter of this name is usually what is denoised."""
    return parameter in _SAMPLE or parameter.startswith("noisy_")


@functools.cache
def is_time(parameter: str) -> bool:
    """Whether it usually says how far denoising is."""
    return parameter in _TIMES or "timestep" in parameter or parameter.endswith(_TIME)


@functools.cache
def is_conditioning(parameter: str) -> bool:
    """Whether it usually stays the same through all steps of a branch."""
    return not (_is_residual(parameter) or is_sample(parameter) or is_time(parameter))


def _is_residual(parameter: str) -> bool:
    return any(word in parameter for word in _RESIDUAL)


@functools.cache
def _is_surely_conditioning(parameter: str) -> bool:
    return parameter == "y" or (is_conditioning(parameter) and any(word in parameter for word in _CONDITIONING))


@functools.cache
def hint(path: str) -> Role:
    """The role of an argument as its name has it."""
    parameter, *inner = [part for part in path.split(".") if not part.isdigit()] or [path]
    names = [parameter] if _is_surely_conditioning(parameter) else [*inner[-1:], parameter]
    for name in names:  # Of an object that holds all arguments, the name of the field says more.
        if is_sample(name):
            return "sample"
        if is_time(name):
            return "time"
        if _is_residual(name):
            return "residual"
    return "conditioning"


@functools.cache
def is_well_known(path: str) -> bool:
    """Whether the name of a conditioning argument leaves little doubt."""
    return any(_is_surely_conditioning(part) for part in path.split("."))


def parameter_names(module: torch.nn.Module) -> tuple[str, ...]:
    """What a module's forward takes; "*rest" for all further positional arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple("*" + p.name if p.kind is p.VAR_POSITIONAL else p.name for p in parameters)


def positional_names(parameters: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The names of that many positional arguments."""
    place = next((place for place, name in enumerate(parameters) if name.startswith("*")), None)
    if place is None:
        return parameters[:count]
    return (*parameters[:place], *(f"{parameters[place][1:]}.{i}" for i in range(count - place)))[:count]


def leaves_of(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a call."""
    found: dict[str, Any] = {}
    for name, value in (*zip(positional_names(parameters, len(args)), args, strict=False), *kwargs.items()):
        if value is None or isinstance(value, torch.Tensor):
            found[name] = value
        else:
            found.update(tree.leaves(value, name))
    return found


@dataclass(slots=True)
class _Evidence:
    """How an argument behaved from step to step."""

    moved: int = 0
    stayed: int = 0
    form: Role = "residual"
    """What it is if it changes at every step."""


_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def _key(value: Any) -> Hashable:
    if isinstance(value, _ATOMS):
        return value
    return type(value) if isinstance(value, (list, tuple, Mapping)) else id(value)  # Containers among leaves are empty.


class Roles:
    """What is known about a model's arguments. It is learned over calls, and outlives runs."""

    def __init__(self) -> None:
        self._seen: dict[str, _Evidence] = {}
        self._roles: dict[str, Role] = {}
        self._outputs: set[tuple[int, ...]] = set()
        self._batch = 1
        self._uncertain: set[str] = set()
        self.remade: set[str] = set()
        """Arguments that are new objects with the old values at each call."""
        self.telling: set[str] = set()
        """Arguments that have distinguished two branches on their own."""
        self.version = 0
        """Grows whenever a role changes."""

    def of(self, path: str) -> Role:
        """The role of the argument, or of the part of an argument, at a dotted path."""
        known = self._roles.get(path)
        if known is None:
            known = self._roles[path] = self._judge(path)
        return known

    def is_certain(self, path: str) -> bool:
        """Whether the same object means the same values, and another object other values."""
        return path not in self.remade and path not in self._uncertain

    def is_learning(self, leaves: Leaves) -> bool:
        """Whether there is an argument of which too little has been seen."""
        seen = self._seen
        return any(
            value is not None and (path not in seen or seen[path].moved + seen[path].stayed < _ENOUGH)
            for path, value in leaves.items()
        )

    def is_settled(self, path: str) -> bool:
        """Whether enough has been seen of it, or its name leaves little doubt."""
        return path in self.telling or is_well_known(path) or not self.is_learning({path: True})

    def identity(self, leaves: Leaves) -> tuple[tuple[Hashable, ...], bool]:
        """What is the same for two calls with the very same conditioning, and whether any tensor is part of it.

        Remade arguments are left out, since their identity says nothing.
        """
        key: list[Hashable] = []
        has_tensor = False
        for path, value in leaves.items():
            if (self._roles.get(path) or self.of(path)) != "conditioning" or path in self.remade:
                continue
            if isinstance(value, torch.Tensor):
                has_tensor = True
                if value.is_inference():  # Nobody counts its changes.
                    self._uncertain.add(path)
                    key += (path, id(value))
                else:
                    key += (path, id(value), value._version)
            else:
                key += (path, _key(value))
        return tuple(key), has_tensor

    def can_tell(self, leaves: Leaves) -> bool:
        """Whether there is any conditioning by which branches could be distinguished."""
        for path, value in leaves.items():
            if value is not None and self.of(path) == "conditioning":
                if isinstance(value, torch.Tensor) or path in self.telling:
                    return True
                if isinstance(value, (int, float)) and not isinstance(value, bool) and is_well_known(path):
                    return True
        return False

    # ------------------------------------------------------------------------------------------ forms

    def note_output(self, output: Any) -> None:
        """Learn what the model gives: what has the form of it is what is denoised."""
        tensors = list(tree.tensors(output))
        if tensors:
            self._outputs = {tuple(tensor.shape) for tensor in tensors}
            self._batch = max([tensor.shape[0] for tensor in tensors if tensor.ndim], default=1)

    def is_like_output(self, value: Any) -> bool:
        """Whether a value could be what is denoised."""
        return isinstance(value, torch.Tensor) and value.is_floating_point() and tuple(value.shape) in self._outputs

    def is_like_time(self, value: Any) -> bool:
        """Whether a value could be a time: one number for each item of the batch, or one for all."""
        if isinstance(value, torch.Tensor):
            return 0 < value.numel() <= self._batch and value.dtype != torch.bool
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def samples(self, leaves: Leaves) -> list[str]:
        """What is denoised, and, as long as none has been seen to change, what else has the form of it."""
        known = [path for path in leaves if self.of(path) == "sample"]
        if self.have_moved(known):
            return known
        rest = (path for path in leaves if self.of(path) == "conditioning" and not is_well_known(path))
        return [*known, *(path for path in rest if self.is_like_output(leaves[path]))]

    def times(self, leaves: Leaves) -> list[str]:
        """The times of a call, and, as long as none has been seen to change, what else could be one."""
        known = [path for path, value in leaves.items() if self.of(path) == "time" and value is not None]
        if self.have_moved(known):
            return known
        rest = (path for path in leaves if self.of(path) == "conditioning" and not self.is_settled(path))
        return [*known, *(path for path in rest if self.is_like_time(leaves[path]))]

    def have_moved(self, paths: Iterable[str]) -> bool:
        """Whether any of these has been seen to change from one step to the next."""
        return any(path in self._seen and self._seen[path].moved > 0 for path in paths)

    # ------------------------------------------------------------------------------------------ learning

    def note_step(self, leaves: Leaves, moved: Collection[str]) -> None:
        """Learn from one step of a branch to the next: `moved` is what has another value than before."""
        has_sample = any(self.of(path) == "sample" or self.is_like_output(leaves.get(path)) for path in moved)
        for path, value in leaves.items():
            if value is None:
                continue
            seen = self._seen.setdefault(path, _Evidence())
            if path in moved:
                seen.moved += 1
                seen.form = self._form(path, value, moved, leaves)
            elif has_sample or hint(path) == "conditioning":  # Else the user may have called with the same sample.
                seen.stayed += 1
        self._update(leaves)

    def note_changing(self, leaves: Leaves, paths: Collection[str]) -> None:
        """Learn that these change at every step."""
        for path in paths:
            form = self._form(path, leaves.get(path), paths, leaves)
            self._seen[path] = _Evidence(moved=_ENOUGH, form=form)
        self._update(paths)

    def obvious(self, leaves: Leaves, moved: Collection[str]) -> list[str]:
        """What must be the sample or the time among arguments of unknown names, for nothing else could be it."""
        found = []
        known = {self.of(path) for path, value in leaves.items() if value is not None}
        if "sample" not in known:
            like = self.samples(leaves)
            moving = [path for path in like if path in moved]
            if len(moving) == 1 and (len(like) == 1 or any(path in moved for path in self.times(leaves))):
                found.append(moving[0])
        if "time" not in known and (found or any(self.of(path) == "sample" for path in moved)):
            times = [path for path in self.times(leaves) if path in moved]
            found += times if len(times) == 1 else []
        return found

    def note_remade(self, path: str) -> None:
        """Learn that this is a new object at each call, with the old values."""
        self.remade.add(path)
        self.version += 1

    def note_telling(self, path: str) -> None:
        """Learn that this alone distinguished two branches of one step."""
        self.telling.add(path)
        self._update([path])

    def _form(self, path: str, value: Any, moved: Collection[str], leaves: Leaves) -> Role:
        if self.is_like_output(value):
            # Beside a known sample of that form it may be either. A residual is watched more closely.
            samples = [leaves[p] for p in moved if p != path and p in leaves and self.of(p) == "sample"]
            is_taken = any(isinstance(other, torch.Tensor) and other.shape == value.shape for other in samples)
            return "residual" if is_taken else "sample"
        return "time" if self.is_like_time(value) else "residual"

    def _update(self, paths: Iterable[str]) -> None:
        for path in paths:
            role = self._judge(path)
            if self._roles.get(path, role) != role:
                self.version += 1
            self._roles[path] = role

    def _judge(self, path: str) -> Role:
        named, seen = hint(path), self._seen.get(path)
        if path in self.telling:
            return "conditioning"
        if seen is None or seen.moved + seen.stayed < _ENOUGH:
            return named
        if seen.moved > 4 * seen.stayed:
            return seen.form if named == "conditioning" else named
        return "conditioning" if seen.moved == 0 and named != "residual" else named


# ------------------------------------------------------------------------------------------------ values

_MOST_COPIED = 4096
"""Elements of a tensor that are copied to compare them later."""


class Mark:
    """A value as it was at a call, to be compared with that of a later one."""

    __slots__ = ("_form", "_some", "_version", "held")

    def __init__(self, value: Any, *, hold: bool, copy: bool) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        self.held: Any = value if hold or not is_tensor else None
        self._version = tree.version(value) if is_tensor else None
        self._form = (value.shape, value.dtype, value.device) if is_tensor else None
        self._some = _some(value).clone() if is_tensor and copy and _is_comparable(value) else None

    def is_surely_same(self, value: Any) -> bool:
        """Whether it is known to be the same without a look at what is in a tensor."""
        if isinstance(value, torch.Tensor):
            return value is self.held and self._version is not None and value._version == self._version
        return self.equals(value)

    def equals(self, value: Any) -> bool:
        """Whether the value is the same. This may wait for the device."""
        if not isinstance(value, torch.Tensor) or self._form is None:
            return self._form is None and not isinstance(value, torch.Tensor) and tree.equal(self.held, value)
        if value is self.held and self._version is not None and value._version == self._version:
            return True
        if (value.shape, value.dtype, value.device) != self._form or not _is_comparable(value):
            return value is self.held and self._version is None
        held = self.held
        if held is not None and held is not value and tree.version(held) == self._version and _is_comparable(held):
            return torch.equal(held, value)
        if self._some is not None:
            return torch.equal(self._some, _some(value))
        return value is held and self._version is None


def same_marks(one: Mark | None, other: Mark | None) -> bool:
    """Whether two values were the same."""
    if one is None or other is None:
        return one is other
    if one.held is not None or one._form is None:
        return other.equals(one.held)
    if other.held is not None or other._form is None:
        return one.equals(other.held)
    return one._form == other._form and one._some is not None and other._some is not None and (
        torch.equal(one._some, other._some)
    )  # fmt: skip


def _is_comparable(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Elements spread over a tensor. The distance is odd: else only some of the channels would be seen."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _MOST_COPIED) | 1] if flat.numel() > _MOST_COPIED else flat
