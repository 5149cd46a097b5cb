"""How does a forward run without weights, and how much memory would it take?

The weights are on the meta device: they have shapes and no values. What the weights touch has no values either, but
everything else keeps its own: token ids, masks and timesteps, on which many a forward branches. So tensors with and
without values meet in one operation, which torch refuses and `Weightless` allows; the result has no values.

Memory is counted as an allocator on a GPU sees it: each new storage from the operation that makes it until nobody holds
it. Views and in-place operations make none, and attention is a fused kernel that makes its output alone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..arch.modules import unwrapped
from ..core.interop import compute_dtype
from ..core.tensor_parts import is_plain, is_strided
from ..hooks.handle import for_now
from .shadow import Copier, subclass
from .tape import tensors_in

_CPU, _META = torch.device("cpu"), torch.device("meta")
_ROUNDING = 512
"""Allocations take multiples of this, as in torch's allocator for GPUs."""
_MOST_VALUES = 2**16
"""A tensor with more elements loses its values: only small ones say how a forward goes on."""
_MOST_MADE = 2**24
"""The same of what is made from values: a mask of each token for each other one takes minutes and gigabytes."""
_FEW_VALUES = 2**8
"""Tensors with no more elements make no large one."""


def weightless(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor of the same form without values."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def with_few_values(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU of a small tensor; any other without values."""
    if tensor.is_meta or tensor.numel() > _MOST_VALUES or tensor.is_nested:
        return weightless(tensor)
    return tensor.detach().to("cpu", copy=True)


def _dequantising(self: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a quantised layer without weights: each call makes the weight that it computes with."""
    bias = None if self.bias is None else self.bias.to(input.dtype)
    return functional.linear(input, self.weight.to(input.dtype), bias)


def simplify(shadow: torch.nn.Module) -> None:
    """Have the shadow of a quantised layer do without what its library does to its weight."""
    weight = shadow._parameters.get("weight")
    if isinstance(shadow, torch.nn.Linear) and weight is not None and not is_plain(weight):
        shadow.__class__ = subclass(type(shadow), _dequantising)  # type: ignore[assignment]
        bare = torch.empty(shadow.out_features, shadow.in_features, dtype=torch.uint8, device="meta")
        shadow._parameters["weight"] = torch.nn.Parameter(bare, requires_grad=False)


def _count_casts(shadow: torch.nn.Module, dtype: torch.dtype) -> None:
    """Have the shadow of a layer whose weights are cast for each call hold as much memory as they take."""
    num_bytes = dtype.itemsize * sum(p.numel() for p in shadow._parameters.values() if p is not None)
    cast: list[torch.Tensor] = []
    shadow.register_forward_pre_hook(lambda *_: cast.append(torch.empty(num_bytes, dtype=torch.uint8, device="meta")))
    shadow.register_forward_hook(lambda *_: cast.clear())


class WeightlessCopier(Copier):
    """Makes shadows that share no tensor with their modules, and whose weights are on the meta device."""

    def _fill(self, shadow: torch.nn.Module, module: torch.nn.Module) -> None:
        super()._fill(shadow, module)
        shadow._forward_pre_hooks.clear()  # They would bring weights.
        simplify(shadow)
        dtype = compute_dtype(module)
        if dtype is not None:
            _count_casts(shadow, dtype)
        for name, parameter in shadow._parameters.items():
            if parameter is not None:
                bare = weightless(parameter, dtype if parameter.is_floating_point() else None)
                shadow._parameters[name] = torch.nn.Parameter(bare, requires_grad=False)

    def _copied(self, value: Any, levels: int) -> Any:
        if isinstance(value, torch.Tensor):
            return weightless(value) if isinstance(value, torch.nn.Parameter) else with_few_values(value)
        return super()._copied(value, levels)


def weightless_twin(module: torch.nn.Module) -> torch.nn.Module:
    """A module's shadow without weights, to be called inside `Weightless`."""
    return WeightlessCopier({}, sharded=False).copy(unwrapped(module))


class Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors with and without values may meet, and the memory of what is made is counted."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        """Bytes of what was made inside and is still held."""
        self.peak_bytes = 0
        """The most of it since this was last set."""
        self._is_paused = False
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._forms: dict[Any, tuple[Any, ...]] = {}
        """Of what operations without values returned, by what they were given."""
        self._fused = _Fused()

    def __enter__(self) -> Weightless:
        self._fused.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._fused.__exit__(*error)  # type: ignore[no-untyped-call]

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Inside, operations are as usual, and what they make is not counted."""
        return for_now(self, _is_paused=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        is_new = bool(given) and all(tensor.is_meta for tensor in given) and _makes_one(func)
        output = self._remembered(func, args, kwargs) if is_new else self._large(func, args, kwargs, given)
        output = _run(func, args, kwargs, given) if output is None else output
        known = {tensor.untyped_storage()._cdata for tensor in given if is_strided(tensor)}
        for tensor in tensors_in(output):
            if is_strided(tensor) and tensor.untyped_storage()._cdata not in known:
                self._count(tensor.untyped_storage())
        return output

    def _remembered(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation without values makes. Blocks repeat each other, and torch takes long to find out."""
        key = func, _form(args), _form(tuple(kwargs.items()))
        try:
            form = self._forms.get(key)
        except TypeError:  # Of an argument that has no hash.
            return _run(func, args, kwargs, tensors_in((args, kwargs)))
        if form is not None:
            size, stride, dtype = form
            return torch.empty_strided(size, stride, dtype=dtype, device=_META)
        output = _run(func, args, kwargs, tensors_in((args, kwargs)))
        if _is_plain(output):
            self._forms[key] = output.shape, output.stride(), output.dtype
        return output

    def _large(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """What an operation on values makes, without them, if it would make very many."""
        has_values = given and not any(tensor.is_meta for tensor in given)
        if not has_values or not _makes_one(func) or max(tensor.numel() for tensor in given) <= _FEW_VALUES:
            return None
        try:
            form = self._remembered(func, _moved(args), {name: _moved(value) for name, value in kwargs.items()})
        except (RuntimeError, NotImplementedError):  # How many it makes is in the values.
            return None
        return form if _is_plain(form) and form.numel() > _MOST_MADE else None

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        if key in self._storages:
            return

        def free(_: Any) -> None:
            del self._storages[key]
            self.num_bytes -= num_bytes

        self._storages[key] = weakref.ref(storage, free)
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


@functools.cache
def _makes_one(func: Any) -> bool:
    """Whether an operation makes one new tensor and changes none."""
    schema: Any = getattr(func, "_schema", None)
    if schema is None or [str(made.type) for made in schema.returns] != ["Tensor"]:
        return False
    return all(part.alias_info is None for part in (*schema.returns, *schema.arguments))


def _form(value: Any) -> Any:
    """What the form of an operation's output depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    return tuple(map(_form, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta and type(value) is torch.Tensor and is_strided(value)


def _run(func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
    """An operation, on whichever device its values are: the devices that a forward names are not real."""
    if kwargs.get("device") == _META:
        return func(*args, **kwargs)
    if not given:
        form = func(*args, **kwargs | {"device": _META}) if "device" in kwargs else None
        return form if form is not None and form.numel() > _MOST_VALUES else func(*args, **kwargs)
    if func is torch.ops.higher_order.flex_attention:
        query, key, value, *_ = args
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return _attend(query, key, value), sums, torch.empty_like(sums)
    has_values = [not tensor.is_meta for tensor in given]
    if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
        return func(*args, **kwargs | {"device": _CPU if has_values[0] else _META})
    if all(has_values) or not any(has_values):
        return func(*args, **kwargs)
    if func.overloadpacket._qualified_op_name.endswith("_"):  # In place: the form stays, and values are not known.
        return args[0]
    if func is torch.ops.aten.index.Tensor:
        args = (args[0], _by_number(args[1]))
    return func(*_moved(args), **{name: _moved(value) for name, value in kwargs.items()})


def _by_number(indices: Iterable[Any]) -> list[Any]:
    """Indices with known masks as numbers: how many elements they pick is in their values."""
    found: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and not index.is_meta
        found.extend(index.nonzero().unbind(-1) if is_mask else (index,))
    return found


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_meta or not value.ndim else value.to("meta")
    if isinstance(value, torch.device):
        return _META
    return type(value)(map(_moved, value)) if type(value) in (list, tuple) else value


class _Fused(TorchFunctionMode):
    """Makes the outputs of functions that are one kernel on a GPU, and many operations on the meta device.

    To Python, all tensors are on the CPU: some of torch's own functions refuse other devices by name.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE and args[0].is_meta:
            return _CPU
        if func is torch.Tensor.__setitem__ and args[0].is_meta:  # There is nothing to set; some do it for each token.
            return None
        kernel = _FUSED.get(func)
        if kernel is not None:
            output = kernel(*args, **(kwargs or {}))
            if output is not None:
                return output
        return func(*args, **(kwargs or {}))


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


@contextlib.contextmanager
def running_weightless() -> Iterator[Weightless]:
    """`Weightless` without gradients."""
    with torch.no_grad(), Weightless() as mode:
        yield mode
