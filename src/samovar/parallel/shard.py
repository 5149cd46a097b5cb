"""How does a plan act on a module? By hooks that split what goes in and gather what comes out.

Both stand around the whole call of their module, other hooks and their bypasses included: so a cache on the same
block sees parts of a sequence whether it lets the block run or answers in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..arch.modules import parameters_of
from ..errors import SettingError
from ..hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from .plan import InputTree, Placement, SequenceParallelInput, SequenceParallelOutput, SequenceParallelPartialInput
from .region import Phase, Region


class AroundHook(ModelHook):
    """A hook that stands around everything else on its module."""

    order = HookOrder.SHARD

    def __init__(self, placement: Placement, region: Region) -> None:
        self.placement = placement
        self._region = region
        self._is_inside = False

    @property
    def name(self) -> str:
        """Under which it is registered."""
        return f"sp_{'output' if self.placement.outputs else 'input'}---{self.placement.key}"

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside or self._region.phase is Phase.OFF:
            return NOT_BYPASSED
        args, kwargs = self.before(module, args, kwargs)
        self._is_inside = True
        try:
            output = module(*args, **kwargs)
        finally:
            self._is_inside = False
        return self.after(output)

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the module is called with."""
        return args, kwargs

    def after(self, output: Any) -> Any:
        """What the caller gets."""
        return output


class SequenceParallelSplitHook(AroundHook):
    """Gives a module this rank's part of what it is called with, or its caller this rank's part of what it returns."""

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.placement.inputs:
            return args, kwargs
        names = list(parameters_of(module))
        given = dict(zip(names, args, strict=False)) | kwargs
        args, kwargs = list(args), dict(kwargs)
        for name, tree in self.placement.inputs.items():
            if given.get(name) is None:
                continue
            part = self._split(given[name], tree, given, name)
            if name in kwargs:
                kwargs[name] = part
            else:
                args[names.index(name)] = part
        return tuple(args), kwargs

    def after(self, output: Any) -> Any:
        if not self.placement.returned:
            return output
        values = list(output) if isinstance(output, (tuple, list)) else [output]
        for index, tree in self.placement.returned.items():
            if index >= len(values):
                raise SettingError(
                    f"The plan splits output {index} of {self.placement.path!r}, which returns {len(values)} values."
                )
            values[index] = self._split(values[index], tree, {}, f"output {index}")
        return type(output)(values) if isinstance(output, (tuple, list)) else values[0]

    def _split(self, value: Any, tree: InputTree, given: dict[str, Any], name: str) -> Any:
        if tree is None or value is None:
            return value
        if isinstance(tree, dict):
            return {key: self._split(part, tree.get(key), given, f"{name}[{key!r}]") for key, part in value.items()}
        if isinstance(tree, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(tree):
                raise SettingError(
                    f"{name} of {self.placement.path!r} is {_described(value)}; a tuple or list of {len(tree)} was "
                    "expected, as the plan has it."
                )
            parts = [
                self._split(part, spec, given, f"{name}[{i}]")
                for i, (part, spec) in enumerate(zip(value, tree, strict=True))
            ]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return self._split_tensor(value, tree, given, name)

    def _split_tensor(
        self, value: Any, spec: SequenceParallelInput | SequenceParallelPartialInput, given: dict[str, Any], name: str
    ) -> Any:
        if not _has_dims(value, spec.expected_dims, spec.split_dim):
            if isinstance(spec, SequenceParallelInput) and spec.is_optional:
                return value
            raise SettingError(
                f"{name} of {self.placement.path or 'the model'!r} is {_described(value)}; the plan expects "
                f"{spec.expected_dims or 'more'} dimensions, to split dimension {spec.split_dim}. Correct the plan: "
                "going on with the whole tensor would give a wrong result."
            )
        if isinstance(spec, SequenceParallelInput):
            return self._region.split(value, spec.split_dim, spec.auto_pad)
        text = self._text_length(spec.text_len_source, given)
        return self._region.split(value, spec.split_dim, kept=text if spec.text_first else -text)

    def _text_length(self, source: str | int, given: dict[str, Any]) -> int:
        if isinstance(source, int):
            return source
        value = given.get(source)
        if isinstance(value, int):
            return value
        if isinstance(value, torch.Tensor) and value.ndim:
            return value.shape[1 if value.ndim > 2 else 0]
        raise SettingError(
            f"{source!r} of {self.placement.path or 'the model'!r} is {_described(value)}; the number of text tokens, "
            "or the text itself, was expected."
        )


class SequenceParallelGatherHook(AroundHook):
    """Gives a module's caller the whole of what it returned in parts."""

    def after(self, output: Any) -> Any:
        specs = self.placement.outputs
        if isinstance(output, torch.Tensor):
            return self._gather(output, specs[0], 0, alone=len(specs) == 1)
        if isinstance(output, dict):  # A model's output with named fields.
            for (name, value), spec in zip(list(output.items()), specs, strict=False):
                output[name] = self._gather(value, spec, 0)
            return output
        if not isinstance(output, (tuple, list)) or len(specs) > len(output):
            raise SettingError(
                f"{self.placement.path or 'the model'!r} returned {_described(output)}; the plan gathers {len(specs)} "
                "outputs."
            )
        padded = [*specs, *[None] * (len(output) - len(specs))]
        values = [self._gather(v, spec, i) for i, (v, spec) in enumerate(zip(output, padded, strict=True))]
        return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)

    def _gather(self, value: Any, spec: SequenceParallelOutput | None, index: int, alone: bool = True) -> Any:
        if spec is None or value is None:
            return value
        if not alone or not _has_dims(value, spec.expected_dims, spec.gather_dim):
            raise SettingError(
                f"Output {index} of {self.placement.path or 'the model'!r} is {_described(value)}; the plan expects "
                f"{spec.expected_dims or 'more'} dimensions, to gather dimension {spec.gather_dim}. Correct the plan."
            )
        return self._region.gather(value, spec.gather_dim, f"{self.placement.path or 'model'}[{index}]")


class BlockHook(ModelHook):
    """Says which block is running, so that an attention is known by its place whatever other blocks are skipped."""

    order = HookOrder.SHARD

    def __init__(self, path: str, region: Region) -> None:
        self._path = path
        self._region = region
        self._open: list[Any] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        inside = self._region.inside_block(self._path)
        inside.__enter__()
        self._open.append(inside)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._open.pop().__exit__(None, None, None)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._open.pop().__exit__(None, None, None)


def hook_for(placement: Placement, region: Region) -> AroundHook:
    """The hook that does what a plan says at one module."""
    make = SequenceParallelGatherHook if placement.outputs else SequenceParallelSplitHook
    return make(placement, region)


def attach_hooks(hooks: Sequence[AroundHook]) -> None:
    """Register hooks at their modules; if one is refused, none is left."""
    attached: list[AroundHook] = []
    try:
        for hook in hooks:
            HookRegistry.get_or_create(hook.placement.module).register_hook(hook.name, hook)
            attached.append(hook)
    except BaseException:
        detach_hooks(attached)
        raise


def detach_hooks(hooks: Sequence[AroundHook]) -> None:
    """Remove hooks from their modules."""
    for hook in hooks:
        HookRegistry.get_or_create(hook.placement.module).remove_hook(hook.name)


def _has_dims(value: Any, expected: int | None, dim: int) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.ndim == expected if expected is not None else -value.ndim <= dim < value.ndim


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else repr(value)[:60]
