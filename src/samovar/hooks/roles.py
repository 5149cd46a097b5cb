"""Roles of a denoiser's arguments: the sample, the time, residuals made from the sample, and conditioning.

A name is only a hint. What counts is how values behave from one step of a branch to the next: the sample and the time
change at every step, and so do residuals that are computed from the sample (a ControlNet's); conditioning stays.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterable, Mapping
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
    plain = next((place for place, name in enumerate(parameters) if name.startswith("*")), len(parameters))
    rest = [f"{parameters[plain][1:]}.{i}" for i in range(count - plain)] if plain < len(parameters) else []
    return (*parameters[:plain], *rest)[:count]


def named_arguments(
    parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, Any]]:
    """The arguments of a call by name, in the order of the parameters: the caller's order of keywords means nothing."""
    place = {name: index for index, name in enumerate(parameters)}
    keywords = sorted(kwargs, key=lambda name: (place.get(name, len(place)), name))
    given = zip(positional_names(parameters, len(args)), args, strict=False)
    return [*given, *((name, kwargs[name]) for name in keywords)]


def leaves_of(parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a call."""
    named = named_arguments(parameters, args, kwargs)
    return {path: leaf for name, value in named for path, leaf in nested.leaves(value, name)}


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

    def are_learned(self, leaves: Leaves) -> bool:
        """Whether all roles have been seen."""
        return all(value is None or path in self._learned for path, value in leaves.items())

    def are_seen(self, paths: Iterable[str]) -> bool:
        """Whether the role of any of these has been seen."""
        return not self._learned.isdisjoint(paths)

    def can_tell(self, leaves: Leaves) -> bool:
        """Whether there is any conditioning by which branches could be distinguished."""
        return any(_is_number_or_tensor(leaves[path]) for path in self.paths(leaves, "conditioning"))

    def candidates(self, leaves: Leaves, role: Role) -> list[str]:
        """The samples or times of a call and, as long as none has been seen, what else could be one."""
        known = [path for path in self.paths(leaves, role) if leaves[path] is not None]
        if self.are_seen(known):
            return known
        rest = [path for path in self.paths(leaves, "conditioning") if not is_well_known(path)]
        return [*known, *(path for path in rest if path not in self._learned and self._form(leaves[path]) == role)]

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
        for path, value in leaves.items() if self.is_later(leaves, moved) else ():
            if value is not None and path not in self._learned:
                self.by_path[path] = self._seen_role(path, leaves, path in moved)
                self._learned.add(path)

    def learn_missing(self, leaves: Leaves, moved: Collection[str]) -> bool:
        """Learn from a call that no branch goes on with, and that differs from the nearest one in these: where no name
        says what is the sample or the time, it is the only one that can be. Returns whether there was one."""
        found: dict[str, Role] = {}
        for role in ("sample", "time") if self.is_later(leaves, moved) else ():
            paths = self.candidates(leaves, role)
            if len(paths) == 1 and self.of(paths[0]) != role:
                found[paths[0]] = role
        self.by_path.update(found)
        self._learned.update(found)
        return bool(found)

    def _seen_role(self, path: str, leaves: Leaves, is_moved: bool) -> Role:
        """The role of an argument that has moved from one step to the next, or has not."""
        named = role_by_name(path)
        if not is_moved:
            return "residual" if named == "residual" else "conditioning"
        form = self._form(leaves[path]) if named == "conditioning" else named
        # Beside another sample of its shape it may be a second one or a residual, whose changes are watched.
        signature, others = nested.signature(leaves[path]), self.paths(leaves, form)
        is_taken = any(nested.signature(leaves[other]) == signature for other in others if other != path)
        return "residual" if is_taken and named == "conditioning" else form

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
