"""Forwards without weights, and the memory that they would take.

The weights are on the meta device: they have shapes and no values. What the weights touch has no values either, but
everything else keeps its own: token ids, masks and timesteps, on which many a forward branches. So tensors with and
without values meet in one operation, which torch refuses and `MetaMode` allows; the result has no values.

Memory is counted as an allocator on a GPU sees it: each new storage from the operation that makes it until nobody holds
it. Views and in-place operations make none, and attention is a fused kernel that makes its output alone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..arch.modules import tensor_bytes
from ..core import nested
from ..core.interop import compute_dtype, memory_of
from ..core.tensor_parts import is_plain, is_strided
from ..hooks.handle import for_now
from .twin import Answers, Copier, Forward, answer

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ROUNDING = 512
"""Allocations take multiples of this, as in torch's allocator for GPUs."""
_MAX_VALUES = 2**16
"""A tensor with more elements loses its values: only small ones say how a forward goes on."""
_MAX_MADE = 2**24
"""The same of what is made from values: a mask of each token for each other one takes minutes and gigabytes."""
_FEW_VALUES = 2**8
"""Tensors with no more elements make no large one."""


def without_values(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same form without values."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=_META)


def with_few_values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of a small tensor; any other without values."""
    if tensor.is_meta or tensor.numel() > _MAX_VALUES or tensor.is_nested:
        return without_values(tensor)
    return tensor.detach().to("cpu", copy=True)


class MetaCopier(Copier):
    """Makes twins that share no tensor with their modules, and whose weights are on the meta device."""

    def __init__(self, answers: Answers | None = None) -> None:
        super().__init__(answers, sharded=False)

    def place_weights(self, twin: torch.nn.Module, module: torch.nn.Module) -> None:
        dtype, weight = compute_dtype(module), module._parameters.get("weight")
        for name, parameter in module._parameters.items():
            if parameter is not None:
                bare = without_values(parameter, dtype if parameter.is_floating_point() else None)
                twin._parameters[name] = torch.nn.Parameter(bare, requires_grad=False)
        if isinstance(module, torch.nn.Linear) and weight is not None and not is_plain(weight):
            packed = torch.empty(module.out_features, module.in_features, dtype=torch.uint8, device=_META)
            twin._parameters["weight"] = torch.nn.Parameter(packed, requires_grad=False)
            answer(twin, functools.partial(_dequantised, twin))
        elif dtype is not None:
            answer(twin, functools.partial(_cast, tensor_bytes([twin])))

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return without_values(tensor) if isinstance(tensor, torch.nn.Parameter) else with_few_values(tensor)


def _dequantised(layer: Any, forward: Forward, args: Any, kwargs: Any) -> torch.Tensor:
    """A quantised layer without what its library does: each call makes the weight that it computes with."""
    given: torch.Tensor = args[0] if args else kwargs["input"]
    bias = None if layer.bias is None else layer.bias.to(given.dtype)
    return functional.linear(given, layer.weight.to(given.dtype), bias)


def _cast(num_bytes: int, forward: Forward, args: Any, kwargs: Any) -> Any:
    """A layer whose weights are cast for each call."""
    cast = torch.empty(num_bytes, dtype=torch.uint8, device=_META)
    output = forward(*args, **kwargs)
    del cast
    return output


class MetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors with and without values may meet, and the memory of what is made is counted."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        """Bytes of what was made inside and is still held."""
        self.peaks: Counter[str] = Counter()
        """The most of it, by who was running."""
        self._running = ""
        self._is_paused = False
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._fused = _Fused()

    def __enter__(self) -> MetaMode:
        self._fused.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fused.__exit__(*error)  # type: ignore[no-untyped-call]

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Inside, operations are as usual, and what they make is not counted."""
        return for_now(self, _is_paused=True)

    def runs(self, name: str) -> None:
        """From now on this is running."""
        self._running = name
        self.peaks[name] = max(self.peaks[name], self.num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        given = list(nested.tensors((args, kwargs)))
        output = _run(func, args, kwargs, given)
        known = {memory_of(tensor) for tensor in given if is_strided(tensor)}
        for tensor in nested.tensors(output):
            if is_strided(tensor) and memory_of(tensor) not in known:
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, -(-storage.nbytes() // _ROUNDING) * _ROUNDING

        def free(_: Any) -> None:
            del self._storages[key]
            self.num_bytes -= num_bytes

        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, free)
            self.num_bytes += num_bytes
            self.runs(self._running)


def _run(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    """An operation, on whichever device its values are: the devices that a forward names are not real."""
    device, has_values = kwargs.get("device"), [not tensor.is_meta for tensor in given]
    if device == _META:
        return func(*args, **kwargs)
    if func is torch.ops.aten._to_copy.default and device is not None:
        return func(*args, **kwargs | {"device": _META if given[0].is_meta else _CPU})
    if all(has_values):
        form = _form_of_large(func, args, kwargs, given)
        return func(*args, **kwargs) if form is None else form
    if func is torch.ops.higher_order.flex_attention:
        query, key, value, *_ = args
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return _attend(query, key, value), sums, torch.empty_like(sums)
    return _mixed(func, args, kwargs) if any(has_values) else func(*args, **kwargs)


def _mixed(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on tensors with and without values."""
    if func.overloadpacket._qualified_op_name.endswith("_"):  # In place: the form stays, and values are not known.
        return args[0]
    if func is torch.ops.aten.index.Tensor:
        args = (args[0], _by_number(args[1]))
    args, kwargs = tree_map(_moved, (args, kwargs))
    return func(*args, **kwargs)


def _form_of_large(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> torch.Tensor | None:
    """What an operation on values makes, without them, if it would make very many."""
    if not any(tensor.numel() > _FEW_VALUES for tensor in given) and (given or "device" not in kwargs):
        return None
    args, kwargs = tree_map(_moved, (args, kwargs))
    try:
        form = func(*args, **kwargs | ({} if given else {"device": _META}))
    except (RuntimeError, NotImplementedError):  # How many it makes is in the values.
        return None
    is_large = isinstance(form, torch.Tensor) and form.numel() > (_MAX_MADE if given else _MAX_VALUES)
    return form if is_large else None


def _by_number(indices: Iterable[Any]) -> list[Any]:
    """Indices with known masks as numbers: how many elements they pick is in their values."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and not index.is_meta
        found.extend(index.nonzero().unbind(-1) if is_mask else (index,))
    return found


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_meta or not value.ndim else value.to(_META)
    return _META if isinstance(value, torch.device) else value


class _Fused(TorchFunctionMode):
    """Makes the outputs of functions that are one kernel on a GPU, and many operations on the meta device.

    To Python, all tensors are on the CPU: some of torch's own functions refuse other devices by name.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (_DEVICE, torch.Tensor.__setitem__) and args[0].is_meta:
            return _CPU if func == _DEVICE else None  # There is nothing to set; some do it for each token.
        output = _FUSED[func](*args, **kwargs) if func in _FUSED else None
        return func(*args, **kwargs) if output is None else output


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor | None:
    if not query.is_meta or query.ndim < 3:
        return None
    *outer, heads, length = query.shape[:-1]  # Kernels write tokens first, so that joining heads copies nothing.
    return query.new_empty(*outer, length, heads, value.shape[-1]).transpose(-2, -3)


def _normalise(input: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor | None:
    return torch.empty_like(input) if input.is_meta else None


_DEVICE = torch.Tensor.device.__get__
_FUSED: dict[Any, Callable[..., torch.Tensor | None]] = {
    functional.scaled_dot_product_attention: _attend,
    functional.rms_norm: _normalise,
    torch.rms_norm: _normalise,
}
