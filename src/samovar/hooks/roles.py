"""Roles of a denoiser's arguments: the sample, the time, residuals made from the sample, and conditioning.

A name is only a hint. What counts is how values behave from one step of a branch to the next: the sample and the time
change at every step, and so do residuals that are computed from the sample (a ControlNet's); conditioning stays.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch

from ..core import nested

Role = Literal["sample", "time", "residual", "conditioning"]
Leaves = Mapping[str, Any]
"""The tensors, numbers and other atoms of a call's arguments, by a dotted path that begins with the parameter."""
_LEAVES, _CONTAINERS = (torch.Tensor, *nested.ATOMS), (dict, list, tuple)
CONSTANTS = (bool, int, str, type(None))
"""What is the same if it is the same object."""

_SAMPLE = (
    "hidden_states", "audio_hidden_states", "sample", "latent", "latents", "audio_latents", "local_latents", "x", "img",
    "z", "x_t", "xt", "z_t", "zt", "latent_model_input", "model_input"
)  # fmt: skip
_TIME = ("t", "ts", "time", "times", "sigma_t", "noise_level", "noise_levels")
_TIME_ENDINGS = ("sigma", "sigmas", "_time")
_RESIDUAL_WORDS = ("controlnet", "block_samples", "residual")

# ------------------------------------------------------------------------------------------------ names and arguments


@functools.cache
def role_by_name(path: str) -> Role:
    """The usual role of an argument with this name. Of an object that holds all arguments, the field's name counts."""
    parameter, *inner = [part for part in path.split(".") if not part.isdigit()] or [path]
    roles = map(_role_of_word, [*inner[-1:], parameter])
    return next((role for role in roles if role != "conditioning"), "conditioning")


def _role_of_word(name: str) -> Role:
    if name in _SAMPLE or name.startswith("noisy_"):
        return "sample"
    if name in _TIME or "timestep" in name or name.endswith(_TIME_ENDINGS):
        return "time"
    return "residual" if any(word in name for word in _RESIDUAL_WORDS) else "conditioning"


def parameter_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The parameters of a module's forward; "*rest" for all further positional arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple("*" + p.name if p.kind is p.VAR_POSITIONAL else p.name for p in parameters)


def leaves_of(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a call, in the order of the parameters: the caller's order of keywords means nothing."""
    positional, keywords = _names(parameters, len(args), tuple(kwargs))
    given = dict(zip(positional, args, strict=False)) | {name: kwargs[name] for name in keywords}
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, _LEAVES) or (type(value) in _CONTAINERS and not value):
            found[name] = value
        else:
            found.update(nested.leaves(value, name))
    return found


@functools.cache
def _names(
    parameters: tuple[str, ...], count: int, keywords: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the first `count` positional arguments, and those of the others in order."""
    plain = next((place for place, name in enumerate(parameters) if name.startswith("*")), len(parameters))
    rest = (f"{name[1:]}.{index}" for name in parameters[plain : plain + 1] for index in range(count - plain))
    place = {name: index for index, name in enumerate(parameters)}
    ordered = tuple(sorted(keywords, key=lambda name: (place.get(name, len(place)), name)))
    return (*parameters[:plain], *rest)[:count], ordered


# ------------------------------------------------------------------------------------------------ values as they were

MAX_COMPARED = 4096
"""Elements that are copied of a tensor whose changes torch does not count, which are those of inference mode."""


class Snapshot:
    """A value as it was. One that is not held is known as long as it lives."""

    def __init__(self, value: Any, *, hold: bool = True) -> None:
        self.held, self.version, self._some = value, None, None
        if not isinstance(value, torch.Tensor):
            self.held = nested.map_tensors(lambda tensor: tensor, value)  # A model may fill an empty container.
            return
        self.version = None if value.is_inference() else value._version
        if not hold:
            self.held = weakref.ref(value)
        elif self.version is None and _is_comparable(value):
            self._some = nested.spread(value, MAX_COMPARED).clone()

    def is_same(self, value: Any, *, looks: bool = True) -> bool:
        """Whether a value is this one. Unless it `looks` into tensors, which may wait for the device, it is the object
        that counts."""
        held = self.held() if isinstance(self.held, weakref.ref) else self.held
        if not isinstance(value, torch.Tensor) or not isinstance(held, torch.Tensor):
            return nested.same_leaf(held, value) or nested.equal(held, value)
        is_kept = nested.version(held) == self.version
        if held is value and (self._some is None or not looks):
            return is_kept
        if not (looks and is_kept and _is_comparable(value) and nested.signature(held) == nested.signature(value)):
            return False
        if self._some is None:
            return torch.equal(held, value)
        return torch.equal(self._some, nested.spread(value, MAX_COMPARED))


def moved(known: Mapping[str, Snapshot], now: Leaves, paths: Iterable[str], *, looks: bool = True) -> set[str]:
    """Those of these values that are not as they were; what was not there was None."""
    found = set()
    for path in paths:
        before, value = known.get(path, _NONE), now.get(path)
        # Almost all are the very same, which needs no call.
        is_same = before.held is value and (
            isinstance(value, CONSTANTS) if before.version is None else before.version == value._version
        )
        if not is_same and not before.is_same(value, looks=looks):
            found.add(path)
    return found


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a look into a tensor has no side effects: that of a subclass may wait for other ranks."""
    return nested.is_comparable(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)


_NONE = Snapshot(None)


# ------------------------------------------------------------------------------------------------ roles


class Roles:
    """The roles of a model's arguments. They are learned over calls, and outlive runs."""

    def __init__(self) -> None:
        self._learned: dict[str, Role] = {}
        """The roles of arguments, or of their parts, that have been seen and are not only those of their names."""
        self._outputs: set[tuple[int, ...]] = set()
        """The shapes of the model's outputs."""
        self._batch = 1

    def of(self, path: str) -> Role:
        """The role of the argument, or of the part of an argument, at a dotted path."""
        return self._learned.get(path) or role_by_name(path)

    def of_each(self, paths: Iterable[str]) -> dict[str, Role]:
        """The roles of several."""
        return {path: self._learned.get(path) or role_by_name(path) for path in paths}

    def paths(self, leaves: Iterable[str], role: Role) -> list[str]:
        """Those of one role."""
        return [path for path, own in self.of_each(leaves).items() if own == role]

    def are_learned(self, leaves: Leaves) -> bool:
        """Whether all roles have been seen."""
        return all(leaves[path] is None for path in leaves.keys() - self._learned.keys())

    def are_seen(self, paths: Iterable[str]) -> bool:
        """Whether the role of any of these has been seen."""
        return not self._learned.keys().isdisjoint(paths)

    def can_tell(self, leaves: Leaves) -> bool:
        """Whether there is any conditioning by which branches could be distinguished."""
        return any(_is_number_or_tensor(leaves[path]) for path in self.paths(leaves, "conditioning"))

    def candidates(self, leaves: Leaves, role: Role) -> list[str]:
        """The samples or times of a call and, as long as none has been seen, what else could be one."""
        known = [path for path in self.paths(leaves, role) if leaves[path] is not None]
        if self.are_seen(known):
            return known
        rest = [path for path in self.paths(leaves, "conditioning") if path not in self._learned]
        return [*known, *(path for path in rest if self._form(leaves[path]) == role)]

    def is_later(self, leaves: Leaves, moved: Collection[str]) -> bool:
        """Whether a call is at a later step than another, from which these have moved: the sample has, and the time."""
        groups = (self.candidates(leaves, "sample"), self.candidates(leaves, "time"))
        return all(not paths or any(path in moved for path in paths) for paths in groups)

    # ------------------------------------------------------------------------------------------ learning

    def note_output(self, output: Any) -> None:
        """Learn the form of the model's output: an argument of this form may be the sample."""
        tensors = list(nested.tensors(output))
        self._outputs = {nested.shape(tensor) for tensor in tensors}
        self._batch = max([tensor.shape[0] for tensor in tensors if tensor.ndim], default=1)

    def learn_step(self, leaves: Leaves, moved: Collection[str]) -> None:
        """Learn from a branch that goes on: since its last call, these have moved."""
        if not self.is_later(leaves, moved):
            return
        for role in ("sample", "time"):
            self._learn_only([path for path in self.candidates(leaves, role) if path in moved], role)
        for path, value in leaves.items():
            if value is not None and path not in self._learned:
                named = role_by_name(path)
                stays: Role = "residual" if named == "residual" else "conditioning"
                moves: Role = "residual" if named == "conditioning" else named
                self._learned[path] = moves if path in moved else stays

    def learn_missing(self, leaves: Leaves, moved: Collection[str]) -> bool:
        """Learn from a call that no branch goes on with, and that differs from the nearest one in these: where no name
        says what is the sample or the time, it is the only one that can be. Returns whether there was one."""
        roles: tuple[Role, ...] = ("sample", "time") if self.is_later(leaves, moved) else ()
        return bool([role for role in roles if self._learn_only(self.candidates(leaves, role), role)])

    def _learn_only(self, paths: list[str], role: Role) -> bool:
        if len(paths) != 1 or self.of(paths[0]) == role:
            return False
        self._learned[paths[0]] = role
        return True

    def _form(self, value: Any) -> Role:
        """The role that a value looks like: a sample has the shape of the output, and a time is one number for each
        item of the batch, or one for all."""
        if not isinstance(value, torch.Tensor):
            return "time" if _is_number_or_tensor(value) else "residual"
        if value.is_floating_point() and nested.shape(value) in self._outputs:
            return "sample"
        return "time" if 0 < value.numel() <= self._batch and value.dtype != torch.bool else "residual"


def _is_number_or_tensor(value: Any) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
