"""What is the denoiser called with, and what of it has changed since the step before?

The sample and the time change at every step; that is what the signal is for. All else should stay, and
if it does not, it changes what the blocks do in a way that the first block's input does not show:
ControlNet residuals, adapters' hints, conditioning made anew. Such a change counts like the signal's.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..hooks import is_conditioning, is_sample, is_time

_MOST_COMPARED = 16384
"""Elements of a tensor that are looked at to see how much it has changed."""


class Inputs:
    """The arguments of one call of a denoiser."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
        self.args = args
        self.kwargs = kwargs
        self.names = names
        """Of the parameters, in order."""

    @functools.cached_property
    def named(self) -> list[tuple[str, Any]]:
        """Every argument with its parameter's name."""
        return [*zip(self.names, self.args, strict=False), *self.kwargs.items()]

    @functools.cached_property
    def signature(self) -> Hashable:
        """What must be the same for two calls to do the same with their blocks."""
        return tuple([(name, None if is_time(name) else _signature(value)) for name, value in self.named])

    @functools.cached_property
    def numbers(self) -> tuple[float, ...]:
        """Numbers among the arguments other than the time: a change of one changes what the blocks do."""
        return tuple([number for name, value in self.named if not is_time(name) for number in _floats(value)])

    @functools.cached_property
    def watched(self) -> list[tuple[str, torch.Tensor, bool]]:
        """Tensors that should stay as they are: path, tensor, and whether it is conditioning."""
        return [
            (path, tensor, is_conditioning(name))
            for name, value in self.named
            if value is not None and not is_sample(name) and not is_time(name)
            for path, tensor in _tensors(name, value)
            if tensor.numel()
        ]

    def spare(self) -> Inputs:
        """The same for another call: some models empty the lists that they are given."""
        args = tuple(map(_shallow, self.args))
        return Inputs(args, {name: _shallow(value) for name, value in self.kwargs.items()}, self.names)

    def with_other_sample(self) -> Inputs:
        """The same with something else to denoise, at another time."""
        given = [name for name, _ in self.named if not is_time(name)]
        sample = {name for name in given if is_sample(name)} or set(given)

        def other(name: str, value: Any) -> Any:
            return _later(value) if is_time(name) and "ind" not in name else _moved(value) if name in sample else value

        args = tuple(other(name, value) for name, value in zip(self.names, self.args, strict=False))
        return Inputs(args, {name: other(name, value) for name, value in self.kwargs.items()}, self.names)

    def time(self) -> torch.Tensor | float | None:
        """The time of the step, as it is given; of a tensor, the first element counts."""
        for name, value in self.named:
            if is_time(name) and isinstance(value, (torch.Tensor, int, float)):
                return value
        return None

    def device(self) -> torch.device:
        """Where the tensors are."""
        tensors = (tensor for _, value in self.named for _, tensor in _tensors("", value))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def host_time(self) -> float | None:
        """The same, where it can be read without waiting for a device."""
        return on_host(self.time())


def on_host(time: torch.Tensor | float | None) -> float | None:
    """A time, where it can be read without waiting for a device."""
    if isinstance(time, torch.Tensor):
        return float(time.reshape(-1)[0]) if time.device.type == "cpu" and time.numel() else None
    return time


class Watched(NamedTuple):
    """A tensor that should not change from step to step, as it was."""

    held: torch.Tensor | None
    """Itself, where it is expected to stay the same: as long as it is held, nothing else can be mistaken for it."""
    version: int
    some: torch.Tensor | None
    """Some of its elements, where it is not."""


Watch = dict[str, Watched]


def watch(inputs: Inputs) -> Watch:
    """What is to be compared at the next step."""
    return {
        path: Watched(tensor, _version(tensor), None) if is_held else Watched(None, 0, _some(tensor, copy=True))
        for path, tensor, is_held in inputs.watched
    }


def changed(inputs: Inputs, before: Watch) -> list[tuple[str, torch.Tensor, bool]]:
    """What of this call is not the very same: path, tensor, and whether it is conditioning."""
    found = []
    for item in inputs.watched:
        known = before.get(item[0])
        if known is None or not _is_same(item[1], known):
            found.append(item)
    return found


Pair = Sequence[torch.Tensor]
"""How much something has changed, and how large it was, as sums."""


def changes(inputs: Inputs, before: Watch) -> list[Pair]:
    """Of each tensor that has changed."""
    return [_change(_some(tensor), before[path]) for path, tensor, _ in changed(inputs, before) if path in before]


def _change(now: torch.Tensor, known: Watched) -> Pair:
    is_overwritten = known.held is not None and _version(known.held) != known.version
    before = known.some if known.held is None else _some(known.held)
    if is_overwritten or before is None or before.shape != now.shape or before.device != now.device:
        return now.new_ones(()), now.new_zeros(())  # Nobody knows by how much: a change of nothing is infinite.
    return size(now - before), size(before)


def relative(change: float, size: float) -> float:
    """A change in proportion to what has changed."""
    return 0.0 if change == 0 else change / size if size > 0 else float("inf")


def size(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of what is in a tensor, without signs."""
    narrow = tensor.float() if tensor.dtype == torch.float64 else tensor  # torch refuses to narrow on its way.
    total: torch.Tensor = torch.linalg.vector_norm(narrow, 1, dtype=torch.float32)
    return total


def _is_same(tensor: torch.Tensor, known: Watched) -> bool:
    return tensor is known.held and _version(tensor) == known.version


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _some(tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Elements spread over a tensor: few enough to be kept (as a copy, for it may be overwritten), and enough to show
    a change."""
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().reshape(-1)
    apart = -(-flat.numel() // _MOST_COMPARED) | 1  # Odd: else only every so many channels would ever be looked at.
    return flat[::apart].to(torch.float32, copy=copy)


def _tensors(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{path}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(f"{path}.{index}", item)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, Mapping):
        return tuple((str(key), _signature(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(item) for item in value)
    return value if isinstance(value, (str, int, type(None))) else type(value)


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, Mapping):
        yield from _floats(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _floats(item)


def _shallow(value: Any) -> Any:
    if value is None or isinstance(value, torch.Tensor):
        return value
    if type(value) is dict:
        return {key: _shallow(item) for key, item in value.items()}
    return list(map(_shallow, value)) if type(value) is list else value


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value + torch.ones_like(value).cumsum(-1) if value.is_floating_point() else value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_moved(item) for item in value]
    return value


def _later(value: Any) -> Any:
    """Quite another time, whether it goes from 0 to 1 or to 1000, which a model that counts in whole numbers knows."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_later, value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        half = torch.where(value.abs() > 1.5, 500.0, 0.5)  # In the other half, in case a model rounds it coarsely.
        return torch.where(value > half, 0.3 * value, 1.4 * half + 0.3 * value).to(value.dtype)
    if isinstance(value, torch.Tensor):
        return torch.where(value < 2, 1 - value, value // 8)
    if isinstance(value, float):
        return float(_later(torch.tensor(value)))
    return (1 - value if value < 2 else value // 8) if isinstance(value, int) else value
