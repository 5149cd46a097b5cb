"""Which guidance branch is this call, when the pipeline does not say?

Everything that a denoiser is given, but the sample and the time, stays the same through all steps of one
branch: a pipeline passes the very same tensors. So these tell branches apart, and requests, tiles and
whatever else is called in turn.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextvars import Token
from typing import Any

import torch

from .context import CallContext, current_context, enter_context, leave_context
from .registry import HookOrder, ModelHook

_SAMPLE = ("hidden_states", "audio_hidden_states", "sample", "latents", "audio_latents", "local_latents", "x")
_TIME = ("sigma", "sigmas", "_time")
_CHANGING_WITH_THE_SAMPLE = ("controlnet", "block_samples", "residuals")


@functools.cache
def is_sample(parameter: str) -> bool:
    """Whether a denoiser's parameter of this name is what is denoised."""
    return parameter in _SAMPLE


@functools.cache
def is_time(parameter: str) -> bool:
    """Whether it says how far denoising is."""
    return parameter == "t" or "timestep" in parameter or parameter.endswith(_TIME)


@functools.cache
def is_conditioning(parameter: str) -> bool:
    """Whether it stays the same through all steps of a branch."""
    changes = any(word in parameter for word in _CHANGING_WITH_THE_SAMPLE)
    return not (changes or is_sample(parameter) or is_time(parameter))


class BranchHook(ModelHook):
    """Names the branch of a denoiser's call by its conditioning, where the pipeline does not.

    The tensors are held as long as the branch is, so that no new tensor can take the place of an old
    one in memory and be mistaken for it. A pipeline that makes new ones at each step gets a new
    branch at each step: nothing is reused, nothing is wrong.
    """

    order = HookOrder.OUTERMOST
    most_branches = 64
    """Held for a model at a time; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self._parameters: tuple[str, ...] = ()
        self._branches: OrderedDict[tuple[Hashable, ...], tuple[str, list[torch.Tensor]]] = OrderedDict()
        self._count = 0
        self._open = threading.local()

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._parameters = tuple(inspect.signature(module.forward).parameters)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        context = current_context()
        branch = context.branch or self._branch_of(context.request, args, kwargs)
        self._tokens().append(enter_context(context._replace(branch=branch)))
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        leave_context(self._tokens().pop())
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        leave_context(self._tokens().pop())

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self._branches.clear()
        return module

    def drop(self, request: Hashable) -> None:
        """Forget the branches of one request, and let go of their conditioning."""
        for key in [key for key in list(self._branches) if key[0] == request]:
            self._branches.pop(key, None)

    def _tokens(self) -> list[Token[CallContext]]:
        tokens: list[Token[CallContext]] | None = getattr(self._open, "tokens", None)
        if tokens is None:
            tokens = self._open.tokens = []
        return tokens

    def _branch_of(self, request: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        kept = [(name, value) for name, value in given.items() if is_conditioning(name)]
        held = [tensor for _, value in kept for tensor in _tensors(value)]
        if not held:
            return None
        key = (request, *_identity(kept))
        known = self._branches.get(key)
        if known is None:
            self._count += 1
            known = self._branches[key] = (f"conditioning {self._count}", held)
            if len(self._branches) > self.most_branches:
                self._branches.popitem(last=False)
        self._branches.move_to_end(key)
        return known[0]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _identity(value: Any) -> Iterator[Hashable]:
    """What must be equal for two values to be one and the same: the object and version of each tensor."""
    if isinstance(value, torch.Tensor):
        # Inference tensors do not count their changes; a pipeline that changes one in place is not told apart.
        yield id(value), None if value.is_inference() else value._version
    elif isinstance(value, dict):
        yield from _identity(sorted(value.items(), key=str))
    elif isinstance(value, (list, tuple)):
        yield len(value)
        for item in value:
            yield from _identity(item)
    else:
        yield value if isinstance(value, (str, int, float, bool, type(None))) else id(value)
