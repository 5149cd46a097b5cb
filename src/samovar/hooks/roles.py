"""Roles of a denoiser's arguments: the sample, the time, residuals made from the sample, and conditioning.

A name is only a hint. What counts is how values behave from one step of a branch to the next: the sample and the time
change at every step, and so do residuals that are computed from the sample (a ControlNet's); conditioning stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch

from ..core import nested

Role = Literal["sample", "time", "residual", "conditioning"]
Leaves = Mapping[str, Any]
"""The tensors, numbers and other atoms of a call's arguments, by a dotted path that begins with the parameter."""

_SAMPLE = (
    "hidden_states", "audio_hidden_states", "sample", "latent", "latents", "audio_latents", "local_latents", "x", "img",
    "z", "x_t", "xt", "z_t", "zt", "latent_model_input", "model_input"
)  # fmt: skip
_TIME = ("t", "ts", "time", "times", "sigma_t", "noise_level", "noise_levels")
_TIME_ENDINGS = ("sigma", "sigmas", "_time")
_RESIDUAL_WORDS = ("controlnet", "block_samples", "residual")
_CONDITIONING_WORDS = (
    "encoder_hidden_states", "prompt", "text", "txt", "caption", "cap_feats", "embeds", "pooled", "class", "label",
    "mask", "ids", "guidance"
)  # fmt: skip
MAX_COMPARED = 4096
"""Elements of a tensor that are copied to compare them later."""

# ------------------------------------------------------------------------------------------------ names and arguments


@functools.cache
def role_by_name(path: str) -> Role:
    """The usual role of an argument with this name. Of an object that holds all arguments, the field's name counts."""
    parameter, *inner = [part for part in path.split(".") if not part.isdigit()] or [path]
    names = [parameter] if is_well_known(parameter) else [*inner[-1:], parameter]
    return next((role for role in map(_role_of_word, names) if role != "conditioning"), "conditioning")


def _role_of_word(name: str) -> Role:
    if name in _SAMPLE or name.startswith("noisy_"):
        return "sample"
    if name in _TIME or "timestep" in name or name.endswith(_TIME_ENDINGS):
        return "time"
    return "residual" if any(word in name for word in _RESIDUAL_WORDS) else "conditioning"


@functools.cache
def is_well_known(path: str) -> bool:
    """Whether the name of a conditioning argument leaves little doubt."""
    return any(
        part == "y" or (_role_of_word(part) == "conditioning" and any(word in part for word in _CONDITIONING_WORDS))
        for part in path.split(".")
    )


def parameter_names(module: torch.nn.Module) -> tuple[str, ...]:
    """The parameters of a module's forward; "*rest" for all further positional arguments."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple("*" + p.name if p.kind is p.VAR_POSITIONAL else p.name for p in parameters)


@functools.cache
def positional_names(parameters: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The names of the first `count` positional arguments."""
    place = next((place for place, name in enumerate(parameters) if name.startswith("*")), None)
    if place is None:
        return parameters[:count]
    return (*parameters[:place], *(f"{parameters[place][1:]}.{i}" for i in range(count - place)))[:count]


def named_arguments(
    parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments of a call by name, in the order of the parameters: the caller's order of keywords means nothing."""
    if args:
        yield from zip(positional_names(parameters, len(args)), args, strict=False)
    yield from [(name, kwargs[name]) for name in _in_order(parameters, tuple(kwargs))]


@functools.lru_cache(1024)
def _in_order(parameters: tuple[str, ...], keywords: tuple[str, ...]) -> tuple[str, ...]:
    """Keywords in the order of the parameters, and then those that are not among them."""
    known = [name for name in parameters if name in keywords]
    return (*known, *sorted(name for name in keywords if name not in parameters))


def leaves_of(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a call."""
    found: dict[str, Any] = {}
    for name, value in named_arguments(parameters, args, kwargs):
        if value is None or isinstance(value, torch.Tensor):
            found[name] = value
        else:
            found.update(nested.leaves(value, name))
    return found


# ------------------------------------------------------------------------------------------------ roles


class _ByPath(dict[str, Role]):
    """Roles by path: by name, until they have been learned."""

    def __missing__(self, path: str) -> Role:
        role = self[path] = role_by_name(path)
        return role


class Roles:
    """The roles of a model's arguments. They are learned over calls, and outlive runs."""

    def __init__(self) -> None:
        self.by_path = _ByPath()
        """The role of each argument, or of a part of one, by its dotted path."""
        self._learned: set[str] = set()
        """Arguments whose role has been seen, and is not only that of their name."""
        self._outputs: set[tuple[int, ...]] = set()
        """The shapes of the model's outputs."""
        self._batch = 1

    def of(self, path: str) -> Role:
        """The role of the argument, or of the part of an argument, at a dotted path."""
        return self.by_path[path]

    def paths(self, leaves: Iterable[str], role: Role) -> list[str]:
        """Those of one role."""
        known = self.by_path
        return [path for path in leaves if known[path] == role]

    def is_learning(self, leaves: Leaves) -> bool:
        """Whether the role of some argument has not been seen."""
        learned = self._learned
        return any(value is not None and path not in learned for path, value in leaves.items())

    def is_settled(self, path: str) -> bool:
        """Whether the role of an argument has been seen, or its name leaves little doubt."""
        return path in self._learned or is_well_known(path)

    def identity(self, leaves: Leaves) -> tuple[Hashable, ...]:
        """A key that two calls share if they have the very same conditioning."""
        roles = self.by_path
        return tuple((path, _identity(value)) for path, value in leaves.items() if roles[path] == "conditioning")

    def can_tell(self, leaves: Leaves) -> bool:
        """Whether there is any conditioning by which branches could be distinguished."""
        return any(_is_number_or_tensor(leaves[path]) for path in self.paths(leaves, "conditioning"))

    def candidates(self, leaves: Leaves, role: Literal["sample", "time"]) -> list[str]:
        """The samples or times of a call and, as long as none has been seen, what else could be one."""
        known = [path for path in self.paths(leaves, role) if leaves[path] is not None]
        if not self._learned.isdisjoint(known):
            return known
        rest = (path for path in self.paths(leaves, "conditioning") if not self.is_settled(path))
        return [*known, *(path for path in rest if self._form(leaves[path]) == role)]

    def is_known(self, paths: Iterable[str]) -> bool:
        """Whether the role of any of these has been seen."""
        return not self._learned.isdisjoint(paths)

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

    def learn(self, path: str, role: Role) -> None:
        """Learn the role of an argument."""
        self.by_path[path] = role
        self._learned.add(path)

    def learn_step(self, leaves: Leaves, moved: Collection[str]) -> None:
        """Learn from a step of a branch to a later one: these have moved, and conditioning has not."""
        for path, value in leaves.items():
            if value is not None and path not in self._learned:
                named = role_by_name(path)
                if path not in moved:
                    self.learn(path, "residual" if named == "residual" else "conditioning")
                else:
                    self.learn(path, self.changing(path, leaves) if named == "conditioning" else named)

    def changing(self, path: str, leaves: Leaves) -> Role:
        """The role of an argument of an unknown name that changes at every step. Beside another sample of its shape it
        may be a second one or a residual, whose changes are watched."""
        form = self._form(leaves[path])
        known = [leaves[other] for other in self.paths(leaves, form) if other != path]
        is_taken = any(nested.signature(value) == nested.signature(leaves[path]) for value in known)
        return "residual" if is_taken else form

    def obvious(self, leaves: Leaves, moved: Collection[str]) -> dict[str, Role]:
        """What must be the sample or the time among arguments of unknown names, since nothing else could be."""
        found: dict[str, Role] = {}
        for role in ("sample", "time"):
            if not any(leaves[path] is not None for path in self.paths(leaves, role)):
                paths = [path for path in self.candidates(leaves, role) if path in moved]
                found |= dict.fromkeys(paths, role) if len(paths) == 1 else {}
        return found

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


def _identity(value: Any) -> Hashable:
    """What two calls that are given the very same value have in common. Containers among leaves are empty."""
    if isinstance(value, torch.Tensor):
        return id(value), nested.version(value)
    if isinstance(value, nested.ATOMS):
        return value
    return type(value) if isinstance(value, (list, tuple, Mapping)) else id(value)


# ------------------------------------------------------------------------------------------------ values

_NOT_HELD = object()


class Snapshot:
    """A value as it was at a call, to be compared with that of a later one."""

    __slots__ = ("_form", "_id", "_sampled", "_version", "held")

    def __init__(self, value: Any, *, hold: bool, copy: bool) -> None:
        """`hold` keeps a tensor alive; `copy` keeps some of its elements, in case it is changed in place. With neither,
        only the identity of a tensor is known."""
        self._id = id(value)
        self._version = self._form = self._sampled = None
        self.held: Any = value
        if isinstance(value, torch.Tensor):
            self.held = value if hold else _NOT_HELD
            if hold or copy:
                self._version, self._form = nested.version(value), nested.signature(value)
            if copy and _is_comparable(value):
                self._sampled = _sampled(value).clone()

    def is_object(self, value: Any) -> bool:
        """Whether this is the very same object, changed or not."""
        return id(value) == self._id

    def is_surely_same(self, value: Any) -> bool:
        """Whether it is known to be the same without looking into a tensor."""
        if isinstance(value, torch.Tensor):
            return value is self.held and self._version is not None and nested.version(value) == self._version
        return nested.equal(self.held, value)

    def equals(self, value: Any) -> bool:
        """Whether the value is the same. This may wait for the device."""
        if self.is_surely_same(value) or not isinstance(value, torch.Tensor):
            return self.is_surely_same(value)
        if self._form is None:
            return self.is_object(value)
        if nested.signature(value) != self._form:
            return False
        held = self.held
        if _is_comparable(value):
            is_kept = held is not value and isinstance(held, torch.Tensor) and nested.version(held) == self._version
            if is_kept and _is_comparable(held):
                return torch.equal(held, value)
            if self._sampled is not None:
                return torch.equal(self._sampled, _sampled(value))
        return self.is_object(value) and (held is _NOT_HELD or self._version is None)


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a look into a tensor has no side effects: that of a subclass may wait for other ranks."""
    return nested.is_comparable(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Elements spread over a tensor. The distance is odd, since an even one would miss some channels altogether."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // MAX_COMPARED) | 1] if flat.numel() > MAX_COMPARED else flat
