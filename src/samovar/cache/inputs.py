"""What is the denoiser called with, and what of it has changed since the step before?

The sample and the time change at every step, and the signal covers them. Conditioning stays the same: if it changes, a
new history begins. Anything else that changes from step to step, such as the residuals of a ControlNet, affects the
blocks in a way that the first block's input does not show; such a change counts like the signal's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core import nested
from ..hooks import Role, Roles
from ..hooks.roles import Leaves, leaves_of, named_arguments, positional_names

MAX_COMPARED = 16384
"""Number of elements compared to see how much a tensor has changed."""
_PLAIN = (type(None), bool, int, float, str)


class Inputs:
    """The arguments of one call of a denoiser."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: tuple[str, ...],
        roles: Roles,
        leaves: Leaves | None = None,
    ) -> None:
        """`names`: the parameters of the model's forward. `leaves`: what the arguments hold, if that is known."""
        self.args = args
        self.kwargs = kwargs
        self._names = names
        self.roles = roles
        self.tensors: list[torch.Tensor] = []
        self.watched: list[tuple[str, torch.Tensor, bool]] = []
        """Tensors other than sample and time: path, tensor, and whether it is conditioning."""
        self.samples: list[torch.Tensor] = []
        """The sample, or its parts."""
        self.lists_samples = False
        """Whether the samples are in a list: each is an image then."""
        self.time: torch.Tensor | float | None = None
        """The timestep as given. Of several numbers the largest counts: frames that are given are at time 0."""
        self.objects: list[Any] = []
        """Conditioning of other types; containers among them are empty."""
        self._form: list[Any] = []
        self.numbers: tuple[float, ...] = ()
        """Floats among the arguments other than the time: a change of one changes what the blocks do."""
        for path, leaf in (leaves_of(names, args, kwargs) if leaves is None else leaves).items():
            self._form.append(path)
            (self._take if isinstance(leaf, torch.Tensor) else self._read)(path, leaf, roles.by_path[path])

    def _take(self, path: str, tensor: torch.Tensor, role: Role) -> None:
        self.tensors.append(tensor)
        self._form.append(None if role == "time" else nested.signature(tensor))
        if role == "time":
            self.time = tensor if self.time is None else self.time
        elif role == "sample":
            self.samples.append(tensor)
            self.lists_samples = path.rpartition(".")[2].isdigit()
        elif tensor.numel():
            self.watched.append((path, tensor, role == "conditioning"))

    def _read(self, path: str, leaf: Any, role: Role) -> None:
        """Anything but a tensor."""
        if isinstance(leaf, (np.generic, np.ndarray)) and leaf.size == 1:
            leaf = leaf.item()
        self._form.append(None if role == "time" or leaf is None else nested.signature(leaf))
        if role == "time":
            if self.time is None and isinstance(leaf, (int, float)):
                self.time = leaf
        elif isinstance(leaf, float):
            self.numbers += (leaf,)
        elif not isinstance(leaf, _PLAIN) and role == "conditioning":
            self.objects.append(leaf)

    @property
    def sample(self) -> torch.Tensor | None:
        """The sample, or the first of its parts."""
        return self.samples[0] if self.samples else None

    @functools.cached_property
    def signature(self) -> Hashable:
        """Equal for two calls that do the same with their blocks."""
        kind = self.device.type
        casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if casts else None, *self._form

    @functools.cached_property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next((tensor.device for tensor in self.tensors), torch.device("cpu"))

    def copied(self) -> Inputs:
        """The same with tensors and containers that nobody else writes into."""
        args, kwargs = nested.map_tensors(torch.clone, (self.args, self.kwargs))
        return Inputs(args, kwargs, self._names, self.roles)

    def spare(self) -> tuple[Any, Any]:
        """The arguments in other containers: some models empty the lists that they are given."""
        if all(isinstance(value, (torch.Tensor, *_PLAIN)) for value in (*self.args, *self.kwargs.values())):
            return self.args, self.kwargs
        args, kwargs = nested.map_tensors(lambda tensor: tensor, (self.args, self.kwargs))
        return args, kwargs

    def at_another_step(self, output: Any, with_time: bool = True) -> tuple[Any, Any]:
        """Arguments with another sample, and at another time. Where no argument is known to be the sample, it is what
        has the form of the output, or else everything but the time."""
        of, shapes = self.roles.of, {nested.shape(tensor) for tensor in nested.tensors(output)}
        given = named_arguments(self._names, self.args, self.kwargs)
        leaves = [(of(path), leaf) for name, value in given for path, leaf in nested.leaves(value, name)]
        tensors = [(role, leaf) for role, leaf in leaves if isinstance(leaf, torch.Tensor)]

        def those(*roles: Role) -> set[int]:
            return {id(leaf) for role, leaf in tensors if role in roles}

        alike = {id(leaf) for _, leaf in tensors if nested.shape(leaf) in shapes}
        sample = those("residual") | (those("sample") or alike or those("conditioning", "residual"))
        time = those("time") if with_time else set()

        def other(tensor: torch.Tensor) -> torch.Tensor:
            return _later(tensor) if id(tensor) in time else _moved(tensor) if id(tensor) in sample else tensor

        def moved(name: str, value: Any) -> Any:
            if with_time and of(name) == "time" and isinstance(value, (int, float)) and not isinstance(value, bool):
                return type(value)(_later(torch.tensor(value)).item())
            return nested.map_tensors(other, value)

        names = positional_names(self._names, len(self.args))
        args = tuple(moved(name, value) for name, value in zip(names, self.args, strict=False))
        return args, {name: moved(name, value) for name, value in self.kwargs.items()}


def on_host(time: torch.Tensor | float | None) -> float | None:
    """A time, where it can be read without waiting for a device."""
    return None if isinstance(time, torch.Tensor) and time.device.type != "cpu" else read_time(time)


def read_time(time: torch.Tensor | float | None) -> float | None:
    """A time as a number; of several the largest."""
    if not isinstance(time, torch.Tensor):
        return time
    return float(time.item() if time.numel() == 1 else time.max()) if time.numel() else None


class Sample:
    """Recognises the sample of a branch's last call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version = nested.version(tensor)
        has_values = self._version is None and nested.is_comparable(tensor)
        self._some = some(tensor, copy=True) if has_values else None

    def is_that_of(self, tensor: torch.Tensor | None) -> bool:
        """Whether a call is given the same tensor with the same values."""
        if tensor is None or self._tensor() is not tensor:
            return False
        if self._some is not None:
            return torch.equal(self._some, some(tensor))
        return self._version == nested.version(tensor)


# ------------------------------------------------------------------------------------------------ changes


class Watched(NamedTuple):
    """A tensor that is compared with that of the next step."""

    held: torch.Tensor | None
    """The tensor itself, if it is conditioning: while it is held, nothing else can have its identity."""
    version: int | None
    some: torch.Tensor | None
    """Some of its elements, where identity does not suffice."""


Watch = dict[str, Watched]
Pair = Sequence[torch.Tensor] | torch.Tensor
"""How much something changed, and how large it was, as sums."""


def watch(inputs: Inputs) -> Watch:
    """What to compare at the next step."""
    return {path: _watched(tensor, is_held) for path, tensor, is_held in inputs.watched}


def _watched(tensor: torch.Tensor, is_held: bool) -> Watched:
    version = nested.version(tensor)
    if not nested.is_comparable(tensor) or (is_held and version is not None):
        return Watched(tensor, version, None)
    return Watched(tensor if is_held else None, version, some(tensor, copy=True))


def changes(inputs: Inputs, before: Watch) -> list[Pair]:
    """One pair for each tensor that may have changed. Any change of conditioning is infinite."""
    pairs = []
    for path, tensor, is_conditioning in inputs.watched:
        known = before.get(path)
        if known is None:
            pairs.append(_infinite(tensor))
        elif known.held is not tensor or known.version is None or known.version != tensor._version:
            pairs.append(_change_of_all(tensor, known) if is_conditioning else _change_of_some(tensor, known))
    return pairs


def _change_of_some(tensor: torch.Tensor, known: Watched) -> Pair:
    """How much a residual has changed, by some of its elements."""
    now, before = some(tensor) if nested.is_comparable(tensor) else None, known.some
    if now is None or before is None or before.shape != now.shape or before.device != now.device:
        return _infinite(tensor)
    return [size(now - before), size(before)]


def _change_of_all(tensor: torch.Tensor, known: Watched) -> Pair:
    """Whether conditioning has changed at all. If it was overwritten it has: its old values are unknown."""
    held = known.held
    is_kept = held is not None and held is not tensor and nested.version(held) == known.version is not None
    one, other = (tensor, held) if is_kept else (some(tensor) if nested.is_comparable(tensor) else None, known.some)
    if one is None or other is None or not nested.is_comparable(one):
        return _infinite(tensor)
    if (one.shape, one.device) != (nested.shape(other), other.device):
        return _infinite(tensor)
    return [(one != other).any().float(), torch.zeros((), device=tensor.device)]


def _infinite(like: torch.Tensor) -> Pair:
    return [torch.ones((), device=like.device), torch.zeros((), device=like.device)]


def size(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the absolute values of a tensor."""
    narrow = tensor.float() if tensor.dtype == torch.float64 else tensor  # torch does not narrow on the way.
    total: torch.Tensor = torch.linalg.vector_norm(narrow, 1, dtype=torch.float32)
    return total


def some(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Elements spread over a tensor: few enough to keep (as a copy, if it may be overwritten) and enough to show a
    change."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().reshape(-1)
    apart = -(-flat.numel() // MAX_COMPARED) | 1  # Odd: else the same few channels would be compared in every row.
    return flat[::apart].to(torch.float32, copy=copy)


# ------------------------------------------------------------------------------------------------ another step


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.ones_like(tensor).cumsum(-1) if tensor.is_floating_point() else tensor


def _later(tensor: torch.Tensor) -> torch.Tensor:
    """A very different time, whether times go from 0 to 1 or to 1000, which a model that counts in integers takes."""
    if tensor.is_floating_point():
        half = torch.where(tensor.abs() > 1.5, 500.0, 0.5)  # In the other half, in case a model rounds it coarsely.
        return torch.where(tensor > half, 0.3 * tensor, 1.4 * half + 0.3 * tensor).to(tensor.dtype)
    return torch.where(tensor < 2, 1 - tensor, tensor // 8)
