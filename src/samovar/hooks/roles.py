"""Which of a denoiser's arguments is the sample, which the time, and which stay the same through a run?

A name is only a hint. What counts is how values behave from one step of a branch to the next: the sample and the time
change at every step, and so do residuals that are computed from the sample (a ControlNet's); conditioning stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
_ENOUGH = 2
"""Steps after which what was seen of an argument overrules its name."""

# ------------------------------------------------------------------------------------------------ names and arguments


@functools.cache
def role_by_name(path: str) -> Role:
    """The usual role of an argument with this name. Of an object that holds all arguments, the field's name counts."""
    parameter, *inner = [part for part in path.split(".") if not part.isdigit()] or [path]
    names = [parameter] if is_well_known(parameter) else [*inner[-1:], parameter]
    roles = (_role_of_word(name) for name in names)
    return next((role for role in roles if role != "conditioning"), "conditioning")


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


@dataclass(slots=True)
class _Evidence:
    """How an argument behaved from step to step."""

    moved: int = 0
    stayed: int = 0
    form: Role = "residual"
    """Its role if it changes at every step."""

    @property
    def is_enough(self) -> bool:
        return self.moved + self.stayed >= _ENOUGH


class _Judged(dict[str, Role]):
    """The roles that have been judged, by path."""

    def __init__(self, judge: Callable[[str], Role]) -> None:
        super().__init__()
        self._judge = judge

    def __missing__(self, path: str) -> Role:
        role = self[path] = self._judge(path)
        return role


class Roles:
    """The roles of a model's arguments. They are learned over calls, and outlive runs."""

    def __init__(self) -> None:
        self._seen: dict[str, _Evidence] = {}
        self.by_path = _Judged(self._judge)
        """The role of each argument, or of a part of one, by its dotted path."""
        self._settled: set[str] = set()
        """Those of which enough has been seen."""
        self._outputs: set[tuple[int, ...]] = set()
        self._batch = 1
        self.remade: set[str] = set()
        """Arguments that are new objects with the old values at each call."""
        self.telling: set[str] = set()
        """Arguments that have distinguished two branches on their own."""
        self.version = 0
        """Grows whenever a role changes."""

    def of(self, path: str) -> Role:
        """The role of the argument, or of the part of an argument, at a dotted path."""
        return self.by_path[path]

    def paths(self, leaves: Iterable[str], role: Role) -> list[str]:
        """Those of one role."""
        known = self.by_path
        return [path for path in leaves if known[path] == role]

    def is_learning(self, leaves: Leaves) -> bool:
        """Whether too little has been seen of some argument."""
        settled = self._settled
        return any(value is not None for path, value in leaves.items() if path not in settled)

    def is_settled(self, path: str) -> bool:
        """Whether enough has been seen of an argument, or its name leaves little doubt."""
        return path in self.telling or is_well_known(path) or not self.is_learning({path: True})

    def identity(self, leaves: Leaves) -> tuple[Hashable, ...]:
        """A key that two calls share if they have the very same conditioning. Remade arguments are left out."""
        key: list[Hashable] = []
        roles, remade = self.by_path, self.remade
        for path, value in leaves.items():
            if roles[path] == "conditioning" and path not in remade:
                if isinstance(value, torch.Tensor):
                    key += (path, id(value), nested.version(value))
                elif isinstance(value, nested.ATOMS):
                    key += (path, value)
                else:  # Containers among leaves are empty.
                    key += (path, type(value) if isinstance(value, (list, tuple, Mapping)) else id(value))
        return tuple(key)

    def can_tell(self, leaves: Leaves) -> bool:
        """Whether there is any conditioning by which branches could be distinguished."""
        for path in self.paths(leaves, "conditioning"):
            value = leaves[path]
            if isinstance(value, torch.Tensor) or (value is not None and path in self.telling):
                return True
            if _is_number(value) and is_well_known(path):
                return True
        return False

    # ------------------------------------------------------------------------------------------ forms

    def note_output(self, output: Any) -> None:
        """Learn the form of the model's output: an argument of this form may be the sample."""
        tensors = list(nested.tensors(output))
        if tensors:
            self._outputs = {nested.shape(tensor) for tensor in tensors}
            self._batch = max([tensor.shape[0] for tensor in tensors if tensor.ndim], default=1)

    def _is_like_output(self, value: Any) -> bool:
        """Whether a value could be the sample."""
        return isinstance(value, torch.Tensor) and value.is_floating_point() and nested.shape(value) in self._outputs

    def _is_like_time(self, value: Any) -> bool:
        """Whether a value could be a time: one number for each item of the batch, or one for all."""
        if isinstance(value, torch.Tensor):
            return 0 < value.numel() <= self._batch and value.dtype != torch.bool
        return _is_number(value)

    def candidates(self, leaves: Leaves, role: Literal["sample", "time"]) -> list[str]:
        """The samples or times of a call and, as long as none has been seen to change, what else could be one."""
        known = [path for path in self.paths(leaves, role) if leaves[path] is not None]
        if self.have_moved(known):
            return known
        fits = self._is_like_output if role == "sample" else self._is_like_time
        rest = (path for path in self.paths(leaves, "conditioning") if not self.is_settled(path))
        return [*known, *(path for path in rest if fits(leaves[path]))]

    def have_moved(self, paths: Iterable[str]) -> bool:
        """Whether any of these has been seen to change from one step to the next."""
        return any(path in self._seen and self._seen[path].moved > 0 for path in paths)

    # ------------------------------------------------------------------------------------------ learning

    def note_step(self, leaves: Leaves, moved: Collection[str]) -> None:
        """Learn from one step of a branch to the next: `moved` have other values than before."""
        has_sample = any(self.of(path) == "sample" or self._is_like_output(leaves.get(path)) for path in moved)
        for path, value in leaves.items():
            if value is None:
                continue
            seen = self._seen.setdefault(path, _Evidence())
            if path in moved:
                seen.moved += 1
                seen.form = self._form(path, value, moved, leaves)
            elif has_sample or role_by_name(path) == "conditioning":  # Else it may be a call with the same sample.
                seen.stayed += 1
        self._update(leaves)

    def note_changing(self, leaves: Leaves, paths: Collection[str]) -> None:
        """Learn that these change at every step."""
        for path in paths:
            form = self._form(path, leaves.get(path), paths, leaves)
            self._seen[path] = _Evidence(moved=_ENOUGH, form=form)
        self._update(paths)

    def note_remade(self, path: str) -> None:
        """Learn that this is a new object at each call, with the old values."""
        self.remade.add(path)
        self.version += 1

    def note_telling(self, path: str) -> None:
        """Learn that this alone distinguished two branches of one step."""
        self.telling.add(path)
        self._update([path])

    def obvious(self, leaves: Leaves, moved: Collection[str]) -> list[str]:
        """What must be the sample or the time among arguments of unknown names, since nothing else could be."""
        found = []
        known = {self.of(path) for path, value in leaves.items() if value is not None}
        if "sample" not in known:
            like = self.candidates(leaves, "sample")
            moving = [path for path in like if path in moved]
            if len(moving) == 1 and (len(like) == 1 or any(path in moved for path in self.candidates(leaves, "time"))):
                found.append(moving[0])
        if "time" not in known and (found or self.paths(moved, "sample")):
            times = [path for path in self.candidates(leaves, "time") if path in moved]
            found += times if len(times) == 1 else []
        return found

    def _form(self, path: str, value: Any, moved: Collection[str], leaves: Leaves) -> Role:
        if self._is_like_output(value):
            # If another argument of this shape is already the sample, this may be a sample or a residual. Take
            # residual: its changes are watched.
            samples = [leaves[p] for p in self.paths(moved, "sample") if p != path and p in leaves]
            is_taken = any(isinstance(other, torch.Tensor) and other.shape == value.shape for other in samples)
            return "residual" if is_taken else "sample"
        return "time" if self._is_like_time(value) else "residual"

    def _update(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path in self._seen and self._seen[path].is_enough:
                self._settled.add(path)
            role = self._judge(path)
            if self.by_path.get(path, role) != role:
                self.version += 1
            self.by_path[path] = role

    def _judge(self, path: str) -> Role:
        named, seen = role_by_name(path), self._seen.get(path)
        if path in self.telling:
            return "conditioning"
        if seen is None or not seen.is_enough:
            return named
        if seen.moved > 4 * seen.stayed:
            return seen.form if named == "conditioning" else named
        return "conditioning" if seen.moved == 0 and named != "residual" else named


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------------ values

_MOST_COPIED = 4096
"""Elements of a tensor that are copied to compare them later."""


class Snapshot:
    """A value as it was at a call, to be compared with that of a later one."""

    __slots__ = ("_form", "_id", "_is_tensor", "_sampled", "_version", "held")

    def __init__(self, value: Any, *, hold: bool, copy: bool) -> None:
        """`hold` keeps a tensor alive; `copy` keeps some of its elements, in case it is changed in place. With neither,
        only the identity of a tensor is known."""
        self._is_tensor = isinstance(value, torch.Tensor)
        self._id = id(value)
        self.held: Any = value if hold or not self._is_tensor else None
        self._version = self._form = self._sampled = None
        if self._is_tensor and (hold or copy):
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
        return self.equals(value)

    def equals(self, value: Any) -> bool:
        """Whether the value is the same. This may wait for the device."""
        if not isinstance(value, torch.Tensor):
            return not self._is_tensor and nested.equal(self.held, value)
        if self._form is None:
            return self.is_object(value)
        if self.is_surely_same(value):
            return True
        if nested.signature(value) != self._form:
            return False
        held = self.held
        if _is_comparable(value):
            is_kept = held is not None and held is not value and nested.version(held) == self._version
            if is_kept and _is_comparable(held):
                return torch.equal(held, value)
            if self._sampled is not None:
                return torch.equal(self._sampled, _sampled(value))
        return self.is_object(value) and (held is None or self._version is None)


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a look into a tensor has no side effects: that of a subclass may wait for other ranks."""
    return nested.is_comparable(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Elements spread over a tensor. The distance is odd, since an even one would miss some channels altogether."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-flat.numel() // _MOST_COPIED) | 1] if flat.numel() > _MOST_COPIED else flat
