"""Hooks that split a module's inputs and gather its outputs, as a plan says.

Both wrap the whole call of their module, including other hooks and their bypasses: a cache on the same block sees parts
of a sequence whether it lets the block run or answers in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..arch.modules import parameters_of
from ..core import nested
from ..hooks import NOT_BYPASSED, BranchHook, HookOrder, ModelHook
from .plan import Placement, SequenceParallelInput, SequenceParallelOutput, SequenceParallelPartialInput, invalid
from .region import Region


class AroundHook(ModelHook):
    """A hook that wraps everything else on its module."""

    order = HookOrder.SHARD
    _is_inside = False

    def bypass(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return NOT_BYPASSED
        self._is_inside = True
        try:
            return self.around(module, args, kwargs)
        finally:
            self._is_inside = False

    def around(self, module: Module, args: Any, kwargs: Any) -> Any:
        """The answer to a call, or NOT_BYPASSED. Calling the module from here goes through the other hooks."""
        raise NotImplementedError


class ModelCallHook(AroundHook):
    """Wraps the calls of a whole model, and reads their branch from the arguments before they are split."""

    def __init__(self, answer: Callable[[Module, Any, Any], Any]) -> None:
        """`answer` gets the module, its arguments and its keyword arguments."""
        self._answer = answer
        self._branch_hook = BranchHook()

    def initialize_hook(self, module: Module) -> Module:
        return self._branch_hook.initialize_hook(module)

    def around(self, module: Module, args: Any, kwargs: Any) -> Any:
        self._branch_hook.pre_forward(module, *args, **kwargs)
        try:
            return self._answer(module, args, kwargs)
        finally:
            self._branch_hook.post_forward(module, None)


class PlanHook(AroundHook):
    """Does what a plan says at one module."""

    def __init__(self, placement: Placement, region: Region) -> None:
        self.placement = placement
        self._region = region

    @property
    def where(self) -> str:
        return repr(self.placement.path or "the model")

    def around(self, module: Module, args: Any, kwargs: Any) -> Any:
        if self._region.forward is None:
            return NOT_BYPASSED
        args, kwargs = self.before(module, args, kwargs)
        return self.after(module(*args, **kwargs))

    def before(self, module: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments to call the module with."""
        return args, kwargs

    def after(self, output: Any) -> Any:
        """The output to return."""
        return output


class SequenceParallelSplitHook(PlanHook):
    """Gives a module this rank's part of its arguments, or its caller this rank's part of its output."""

    def before(self, module: Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        names = list(parameters_of(self.placement.module))
        given = dict(zip(names, args, strict=False)) | kwargs
        parts = {
            name: self._split(given[name], spec, given, name)
            for name, spec in self.placement.inputs.items()
            if given.get(name) is not None
        }
        args = tuple(parts.get(name, value) for name, value in zip(names, args, strict=False)) + args[len(names) :]
        return args, {name: parts.get(name, value) for name, value in kwargs.items()}

    def after(self, output: Any) -> Any:
        values = list(output) if isinstance(output, (tuple, list)) else [output]
        for index, spec in self.placement.returned.items():
            if index >= len(values):
                raise invalid(f"The plan splits output {index} of {self.where}, which returns {len(values)} values.")
            values[index] = self._split(values[index], spec, {}, f"output {index}")
        return nested.sequence_like(output, values) if isinstance(output, (tuple, list)) else values[0]

    def _split(self, value: Any, spec: Any, given: dict[str, Any], name: str) -> Any:
        if spec is None or value is None:
            return value
        if isinstance(spec, dict):
            return {key: self._split(part, spec.get(key), given, f"{name}[{key!r}]") for key, part in value.items()}
        if isinstance(spec, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(spec):
                raise invalid(
                    f"{name} of {self.where} is {_described(value)}; the plan expects a tuple or list of {len(spec)}."
                )
            parts = [self._split(value[i], of, given, f"{name}[{i}]") for i, of in enumerate(spec)]
            return nested.sequence_like(value, parts)
        if not _has_dims(value, spec.expected_dims, spec.split_dim):
            if isinstance(spec, SequenceParallelInput) and spec.is_optional:
                return value
            raise invalid(
                f"{name} of {self.where} is {_described(value)}; the plan expects {spec.expected_dims or 'more'} "
                f"dimensions, to split dimension {spec.split_dim}. Correct the plan: continuing with the whole tensor "
                "would give a wrong result."
            )
        if isinstance(spec, SequenceParallelInput):
            return self._region.split(value, spec.split_dim)
        text = self._text_length(spec, given)
        return self._region.split(value, spec.split_dim, kept=text if spec.text_first else -text)

    def _text_length(self, spec: SequenceParallelPartialInput, given: dict[str, Any]) -> int:
        source = spec.text_len_source
        value = given.get(source) if isinstance(source, str) else source
        if isinstance(value, int):
            return value
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[1 if value.ndim > 2 else 0]
        raise invalid(
            f"{source!r} of {self.where} is {_described(value)}; expected the number of text tokens, or the text "
            "itself."
        )


class SequenceParallelGatherHook(PlanHook):
    """Gives a module's caller the whole of outputs that are in parts."""

    def after(self, output: Any) -> Any:
        specs = self.placement.outputs
        if isinstance(output, Tensor) and len(specs) == 1:
            return self._gather(output, specs[0], 0)
        if isinstance(output, dict):  # A model's output with named fields.
            for (name, value), spec in zip(list(output.items()), specs, strict=False):
                output[name] = self._gather(value, spec, 0)
            return output
        if not isinstance(output, (tuple, list)) or len(specs) > len(output):
            raise invalid(f"{self.where} returned {_described(output)}; the plan gathers {len(specs)} outputs.")
        gathered = [self._gather(value, spec, i) for i, (value, spec) in enumerate(zip(output, specs, strict=False))]
        return nested.sequence_like(output, [*gathered, *output[len(specs) :]])

    def _gather(self, value: Any, spec: SequenceParallelOutput | None, index: int) -> Any:
        if spec is None or value is None:
            return value
        if not _has_dims(value, spec.expected_dims, spec.gather_dim):
            raise invalid(
                f"Output {index} of {self.where} is {_described(value)}; the plan expects "
                f"{spec.expected_dims or 'more'} dimensions, to gather dimension {spec.gather_dim}. Correct the plan."
            )
        return self._region.gather(value, spec.gather_dim, f"Output {index} of {self.where}")


class BlockHook(ModelHook):
    """Records which block is running: an attention is known by its block, whichever other blocks are skipped."""

    order = HookOrder.SHARD

    def __init__(self, path: str, region: Region) -> None:
        self._path = path
        self._region = region

    def pre_forward(self, module: Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if (forward := self._region.forward) is not None:
            forward.open_blocks.append(self._path)
            forward.counts.pop(self._path, None)
            forward.num_blocks_run += 1
        return args, kwargs

    def post_forward(self, module: Module, output: Any) -> Any:
        if self._region.forward is not None:
            self._region.forward.open_blocks.pop()
        return output

    def failed_forward(self, module: Module, error: BaseException) -> None:
        self.post_forward(module, None)


def _has_dims(value: Any, expected: int | None, dim: int) -> bool:
    if not isinstance(value, Tensor):
        return False
    return value.ndim == expected if expected is not None else -value.ndim <= dim < value.ndim


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else repr(value)[:60]
