"""What reaches the first attention of a block? The modulated input, by which steps are judged.

It is taken from a twin of the block: the same modules and parameters, without anybody's hooks, whose
attention stops the call. So a decision runs no block and, where the block's weights are elsewhere,
loads none: the twin has copies of its own of the few that lead to the attention.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..arch.blocks import attention_modules
from ..arch.modules import unwrapped
from ..hooks.intercept import bare_class

_TWIN_FAILS = (RuntimeError, TypeError, AttributeError)
"""What a block may raise that is run outside of its model: it misses a weight, an attribute or a cast."""

_OTHERS_ENTRIES = (
    "_samovar_hooks", "_samovar_inside", "_hf_hook", "_old_forward", "_diffusers_hook", "_compiled_call_impl", "forward"
)  # fmt: skip


class _Reached(Exception):
    """The twin's attention was called."""

    def __init__(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(path)
        self.path = path
        self.given: dict[int | str, Any] = dict(enumerate(args))
        self.given.update(kwargs.items())


class ModulatedInput:
    """Reads the signal off the arguments of a block."""

    def __init__(
        self,
        block: torch.nn.Module,
        args: Any,
        kwargs: Any,
        stream: torch.Tensor,
        idle: frozenset[str] | None = None,
    ) -> None:
        """`stream` is the argument that carries what is denoised; `idle` what was found of another such block."""
        self._block = unwrapped(block)
        self._twin: torch.nn.Module | None = None
        self._key: int | str = 0
        self.path: str | None = None
        """The attention's, within the block; None where the block's own input has to do."""
        self.idle: frozenset[str] = frozenset()
        """Parts of the block that run before its attention without an effect on the signal."""
        self._made_of = _parts(self._block)
        for stops in _stop_sets(self._block):
            try:
                twin = _twin(self._block, stops, stream.device)
            except _TWIN_FAILS:  # It has parts that cannot be copied.
                return
            reached = _run(twin, args, kwargs)
            if reached is None:
                continue
            key = _choose(reached.given, stream)
            if key is not None and not _is_raw(reached.given[key], stream):
                self._twin, self._key, self.path = twin, key, reached.path
                self.idle = _silence(twin, args, kwargs, key, reached.given[key], idle)
                return

    def __call__(self, args: Any, kwargs: Any, stream: torch.Tensor) -> torch.Tensor:
        """The signal of a call of the block."""
        reached = _run(self._twin, args, kwargs) if self._twin is not None else None
        value = stream if reached is None else reached.given.get(self._key, stream)
        assert isinstance(value, torch.Tensor)
        return value

    def agrees_with(self, value: torch.Tensor, args: Any, kwargs: Any) -> bool:
        """Whether the real attention was given just this."""
        found = {**dict(enumerate(args)), **kwargs}.get(self._key)
        return isinstance(found, torch.Tensor) and torch.equal(value, found)

    def is_current(self) -> bool:
        """Whether the block still has the modules and weights that its twin was made of."""
        now = _parts(self._block)
        return len(now) == len(self._made_of) and all(map(operator.is_, now, self._made_of))

    @property
    def attention(self) -> torch.nn.Module | None:
        """The real attention before which the signal is taken."""
        return None if self.path is None else self._block.get_submodule(self.path)


def _parts(block: torch.nn.Module) -> list[Any]:
    return [*block.modules(), *block.parameters(), *block.buffers()]


def _stop_sets(block: torch.nn.Module) -> Iterator[tuple[str, ...]]:
    """Where the twin may stop: at attention, or, where that gets the raw input, at what is inside it."""
    outer = attention_modules(block)
    yield tuple(outer)
    inner = {f"{path}.{name}": part for path, a in outer.items() for name, part in attention_modules(a).items()}
    yield tuple(inner)
    linear = (torch.nn.Linear, torch.nn.Conv1d)
    yield tuple(
        f"{path}.{name}" for path, a in outer.items() for name, part in a.named_modules() if isinstance(part, linear)
    )


def _choose(given: Mapping[int | str, Any], stream: torch.Tensor) -> int | str | None:
    """Which of the attention's arguments holds what is denoised: by shape, by size, or as part of a longer one."""
    tensors = {key: v for key, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    same_shape = [key for key, value in tensors.items() if value.shape == stream.shape]
    same_size = [key for key, value in tensors.items() if value.numel() == stream.numel()]
    same_width = [key for key, value in tensors.items() if value.shape[-1:] == stream.shape[-1:]]
    same_width.sort(key=lambda key: tensors[key].numel() < stream.numel())
    return next(iter((*same_shape, *same_size, *same_width)), None)


def _is_raw(value: torch.Tensor, stream: torch.Tensor) -> bool:
    return value is stream or (value.shape == stream.shape and torch.equal(value, stream))


def _run(twin: torch.nn.Module, args: Any, kwargs: Any) -> _Reached | None:
    try:
        if torch.is_grad_enabled():
            with torch.no_grad():
                twin(*args, **kwargs)
        elif twin._forward_pre_hooks:
            twin(*args, **kwargs)
        else:
            twin.forward(*args, **kwargs)
    except _Reached as reached:
        return reached.with_traceback(None)  # Its frames hold it, and tensors.
    except _TWIN_FAILS:
        return None
    return None


def _twin(block: torch.nn.Module, stops: Sequence[str], device: torch.device) -> torch.nn.Module:
    twin = _bare_copy(block)
    for path in stops:
        stop = twin.get_submodule(path)
        stop.__class__ = _stopping_class(type(stop), path)
    if any(tensor.device != device for tensor in block.parameters()):
        originals = dict(zip(twin.modules(), block.modules(), strict=True))
        for module in twin.modules():
            module.register_forward_pre_hook(_bring(device, originals[module]))
    return twin


def _silence(
    twin: torch.nn.Module, args: Any, kwargs: Any, key: int | str, value: torch.Tensor, idle: frozenset[str] | None
) -> frozenset[str]:
    """Let those parts of a twin return something at once whose output does not reach the signal."""
    outputs: dict[str, Any] = {}

    def note(path: str) -> Any:
        return lambda module, args, output: outputs.setdefault(path, output)

    handles = [part.register_forward_hook(note(path)) for path, part in twin.named_children()]
    _run(twin, args, kwargs)
    for handle in handles:
        handle.remove()
    silenced = set()
    for path, output in outputs.items():
        part = twin.get_submodule(path)
        speaking = type(part)
        if idle is None:
            part.__class__ = _returning_class(speaking, pytree.tree_map_only(torch.Tensor, _poison, output))
            reached = _run(twin, args, kwargs)
            found = None if reached is None else reached.given.get(key)
            has_effect = not isinstance(found, torch.Tensor) or not torch.equal(found, value)
        else:
            has_effect = path not in idle
        if has_effect:
            part.__class__ = speaking
        else:
            part.__class__ = _returning_class(speaking, pytree.tree_map_only(torch.Tensor, _blank, output))
            silenced.add(path)
    return frozenset(silenced)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    value = torch.nan if tensor.is_floating_point() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _bring(device: torch.device, original: torch.nn.Module) -> Any:
    """A hook that gives a module copies of its own weights, where they are elsewhere, when it first runs."""
    # accelerate leaves nothing in the module itself.
    stored = getattr(vars(original).get("_hf_hook"), "weights_map", None)

    def bring(module: torch.nn.Module, args: Any) -> None:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device != device:
                    source = stored[name] if tensor.is_meta and stored is not None else tensor
                    tensors[name] = source.detach().to(device)  # type: ignore[assignment]

    return bring


def _bare_copy(module: torch.nn.Module) -> torch.nn.Module:
    """The module with the same parameters and children that are such copies, and without anybody's hooks."""
    module = unwrapped(module)
    copy = object.__new__(bare_class(module))
    entries = {key: value for key, value in vars(module).items() if key not in _OTHERS_ENTRIES}
    for key in entries:
        if key.endswith("_hooks") or "_hooks_" in key:
            entries[key] = OrderedDict()
        elif type(entries[key]) in (list, dict, set):  # What a block collects is not the twin's to add to.
            entries[key] = entries[key].copy()
    entries["_parameters"] = dict(module._parameters)
    entries["_buffers"] = dict(module._buffers)
    entries["_modules"] = {name: None if m is None else _bare_copy(m) for name, m in module._modules.items()}
    vars(copy).update(entries)
    return copy


def _returning_class(cls: type[torch.nn.Module], output: Any) -> type[torch.nn.Module]:
    make_class: Any = type(cls)
    body = {"forward": lambda self, *args, **kwargs: output}
    returning: type[torch.nn.Module] = make_class(cls.__name__, (cls,), body)
    return returning


def _stopping_class(cls: type[torch.nn.Module], path: str) -> type[torch.nn.Module]:
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(path, args, kwargs)

    make_class: Any = type(cls)
    stopping: type[torch.nn.Module] = make_class(cls.__name__, (cls,), {"forward": forward})
    return stopping
