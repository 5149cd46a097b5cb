"""Hooks that split a module's inputs and gather its outputs, as a plan says.

Both wrap the whole call of their module, including other hooks and their bypasses: a cache on the same block sees parts
of a sequence whether it lets the block run or answers in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..arch.modules import parameters_of
from ..core import nested
from ..hooks import NOT_BYPASSED, HookOrder, ModelHook
from ..hooks.handle import for_now
from .plan import Placement, SequenceParallelInput, SequenceParallelOutput, invalid
from .region import Region


class AroundHook(ModelHook):
    """A hook that wraps everything else on its module."""

    order = HookOrder.SHARD
    _is_inside = False

    def __init__(self, around: Callable[[Module, Any, Any], Any]) -> None:
        """`around` gives the answer to a call, or NOT_BYPASSED. When it calls the module, that goes through the other
        hooks."""
        self._around = around

    def bypass(self, module: Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return NOT_BYPASSED
        with for_now(self, _is_inside=True):
            return self._around(module, args, kwargs)


class PlanHook(AroundHook):
    """Does what a plan says at one module: gives it this rank's part of its arguments, and its caller this rank's part
    of its outputs, or the whole of them."""

    def __init__(self, placement: Placement, region: Region) -> None:
        super().__init__(self._split_and_gather)
        self.placement = placement
        self._region = region

    def _split_and_gather(self, module: Module, args: Any, kwargs: Any) -> Any:
        if self._region.forward is None:
            return NOT_BYPASSED
        args, kwargs = self.before(args, kwargs)
        return self.after(module(*args, **kwargs))

    def before(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments to call the module with."""
        names, specs = list(parameters_of(self.placement.module)), self.placement.arguments
        given = dict(zip(names, args, strict=False)) | kwargs
        parts = {name: self._apply(spec, given[name], name, given) for name, spec in specs.items() if name in given}
        own = [parts.get(name, value) for name, value in zip(names, args, strict=False)]
        return (*own, *args[len(names) :]), {name: parts.get(name, value) for name, value in kwargs.items()}

    def after(self, output: Any) -> Any:
        """The output to return."""
        specs = self.placement.outputs
        if not specs:
            return output
        # A model's output has named fields.
        values = list(output.values()) if isinstance(output, dict) else output
        is_one = not isinstance(values, (tuple, list))
        if max(specs) >= (1 if is_one else len(values)):
            raise self._misfit(values, "the output", f"{max(specs) + 1} values")
        if is_one:
            return self._apply(specs.get(0), values, "the output", {})
        values = self._apply([specs.get(index) for index in range(len(values))], values, "the output", {})
        if isinstance(output, dict):
            for name, value in zip(list(output), values, strict=True):
                output[name] = value
            return output
        return values

    def _apply(self, spec: Any, value: Any, name: str, given: Mapping[str, Any]) -> Any:
        """A value with its tensors split or gathered, by a plan of the same structure."""
        if spec is None or value is None:
            return value
        if isinstance(spec, dict):
            items = value.items()
            return {key: self._apply(spec.get(key), part, f"{name}[{key!r}]", given) for key, part in items}
        if isinstance(spec, (list, tuple)):
            if not isinstance(value, (list, tuple)) or len(value) != len(spec):
                raise self._misfit(value, name, f"a tuple or list of {len(spec)}")
            parts = (self._apply(of, value[i], f"{name}[{i}]", given) for i, of in enumerate(spec))
            return nested.sequence_like(value, list(parts))
        return self._exchange(spec, value, name, given)

    def _exchange(self, spec: Any, value: Any, name: str, given: Mapping[str, Any]) -> Any:
        """A tensor, split or gathered."""
        gathers, expected = isinstance(spec, SequenceParallelOutput), spec.expected_dims
        dim = spec.gather_dim if gathers else spec.split_dim
        num_dims = value.ndim if isinstance(value, Tensor) else 0
        if not -num_dims <= dim < num_dims or expected not in (None, num_dims):
            if isinstance(spec, SequenceParallelInput) and spec.is_optional:
                return value
            act = "gather" if gathers else "split"
            raise self._misfit(value, name, f"{expected or 'more'} dimensions, to {act} dimension {dim}")
        if gathers:
            return self._region.gather(value, dim, f"{name} of {self.where}")
        if isinstance(spec, SequenceParallelInput):
            return self._region.split(value, dim)
        text = self._text_length(spec.text_len_source, given)
        return self._region.split(value, dim, kept=text if spec.text_first else -text)

    def _text_length(self, source: str | int, given: Mapping[str, Any]) -> int:
        text = given.get(source) if isinstance(source, str) else source
        if isinstance(text, Tensor) and text.ndim:
            return text.shape[1 if text.ndim > 2 else 0]
        if not isinstance(text, int):
            raise self._misfit(text, str(source), "the number of text tokens, or the text itself")
        return text

    @property
    def where(self) -> str:
        return repr(self.placement.path or "the model")

    def _misfit(self, value: Any, name: str, expected: str) -> Exception:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        return invalid(
            f"{name} of {self.where} is {found}; the plan expects {expected}. Correct the plan: going on with the "
            "whole value would give a wrong result."
        )


class SequenceParallelSplitHook(PlanHook):
    """Splits arguments or outputs of a module."""


class SequenceParallelGatherHook(PlanHook):
    """Gathers outputs of a module."""


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
