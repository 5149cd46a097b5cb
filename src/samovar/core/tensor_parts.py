"""The plain tensors that a tensor is made of.

To a model a quantised weight is one tensor; in memory it is several: the numbers, their scales, their zero points. Of
whichever library, it is one of two kinds. A wrapper has no memory of its own and holds its tensors as attributes that
it can name (`__tensor_flatten__`: torchao, optimum-quanto). Any other subclass is a plain piece of memory that may have
further tensors written on it (bitsandbytes, the GGUF parameters of diffusers). Memory is moved by swapping the `data`
of the plain tensors, so all objects stay what they are; a wrapper's device is then set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from operator import is_not
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import nested

_PLAIN = (torch.nn.Parameter, torch.Tensor)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of torch's own types."""
    return type(tensor) in _PLAIN


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one piece of memory."""
    return tensor.layout == torch.strided and not tensor.is_nested


def plainly(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Inside, subclasses of tensors are what they are in memory, and nothing is bound to inference mode."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


class Wrapper:
    """A tensor without memory of its own."""

    def __init__(self, tensor: torch.Tensor, names: Iterable[str]) -> None:
        self.tensor = tensor
        self._names = tuple(names)
        self._first = getattr(tensor, self._names[0])
        self._masks: dict[torch.device, torch.Tensor] = {}

    def follow(self) -> None:
        """Have it say that it is where its inner tensors are. Called `plainly`, for inner wrappers first."""
        device = self._first.device
        if self.tensor.device != device:
            if device not in self._masks:
                self._masks[device] = self._mask()
            self.tensor.data = self._masks[device]

    def _mask(self) -> torch.Tensor:
        """The wrapper's outside as it would be around its inner tensors where they are now; it holds none of them."""
        kind: Any = type(self.tensor)
        _, context = self.tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(self.tensor, name) for name in self._names}
        mask: torch.Tensor = kind.__tensor_unflatten__(inner, context, self.tensor.shape, self.tensor.stride())
        vars(mask).clear()
        return mask


class Parts(NamedTuple):
    """What some tensors are made of."""

    plain: list[torch.Tensor]
    """Each once."""
    wrappers: list[Wrapper]
    """Inner ones first."""


def take_apart(tensors: Iterable[torch.Tensor]) -> Parts:
    """The plain tensors that some tensors are made of, and the wrappers around them."""
    parts, seen = Parts([], []), set[int]()
    for tensor in tensors:
        _take(tensor, parts, seen)
    return parts


@plainly
def rebuilt(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A tensor of the same kind, made of what `change` makes of its plain tensors."""
    if is_plain(tensor):
        return change(tensor)
    if is_traceable_wrapper_subclass(tensor):
        kind: Any = type(tensor)
        names, context = tensor.__tensor_flatten__()
        inner = {name: rebuilt(getattr(tensor, name), change) for name in names}
        return kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    other = change(tensor).as_subclass(type(tensor))
    vars(other).update(nested.map_tensors(lambda part: rebuilt(part, change), vars(tensor)))
    return other


def num_bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of some tensors, whatever they are made of; what is the same memory counts once."""
    return sum({_memory(plain): plain.numel() * plain.element_size() for plain in take_apart(tensors).plain}.values())


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are the same memory."""
    has_address = tensor.layout is torch.strided and not tensor.is_meta
    return (tensor.device, tensor.data_ptr(), tensor.nbytes) if has_address and tensor.numel() else (id(tensor),)


def _take(tensor: torch.Tensor, parts: Parts, seen: set[int]) -> None:
    if id(tensor) in seen:
        return
    seen.add(id(tensor))
    if is_plain(tensor):
        parts.plain.append(tensor)
    elif is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            _take(getattr(tensor, name), parts, seen)
        if names:
            parts.wrappers.append(Wrapper(tensor, names))
    else:
        parts.plain.append(tensor)
        _take_attached(tensor, type(tensor).__module__.partition(".")[0], parts, seen)


def _take_attached(holder: Any, library: str, parts: Parts, seen: set[int]) -> None:
    """Take the tensors among the attributes of an object, and those of objects of the same library."""
    seen.add(id(holder))
    for value in vars(holder).values():
        is_own = type(value).__module__.partition(".")[0] == library and not isinstance(value, torch.nn.Module)
        if isinstance(value, torch.Tensor):
            _take(value, parts, seen)
        elif is_own and hasattr(value, "__dict__") and id(value) not in seen:
            _take_attached(value, library, parts, seen)


def problem_of(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be taken apart into plain pieces of memory; None if it can."""
    name = f"is a {type(tensor).__module__}.{type(tensor).__name__}"
    if any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):
        return f"{name}, which is spread over several ranks"
    if is_lazy(tensor):
        return f"{name}, and has no weights yet"
    plain, again = take_apart([tensor]).plain, take_apart([tensor]).plain
    if not plain or len(plain) != len(again) or any(map(is_not, plain, again)):
        return f"{name}, which is made of other tensors each time one looks"
    for part in plain:
        if type(part).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            kind = f"{type(part).__module__}.{type(part).__name__}"
            return f"is or holds a {kind}, which does not say what it is made of (__tensor_flatten__)"
        if part.is_meta:
            return "is on the meta device and has no weights"
        if part.layout is not torch.strided or part.is_quantized:
            return f"is {'quantised by torch itself' if part.is_quantized else part.layout}"
    return None


def is_bound_to_its_device(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a wrapper's library packs it otherwise for this device, so that its bytes mean nothing there."""
    moved = tensor.to(device)
    ours, theirs = take_apart([tensor]).plain, take_apart([moved]).plain
    return len(ours) != len(theirs) or not all(map(_is_same, ours, theirs))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    forms = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in (one, other)]
    return forms[0] == forms[1] and torch.equal(bits(one.cpu()), bits(other.cpu()))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes, so that NaN equals itself."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # One number has any stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
