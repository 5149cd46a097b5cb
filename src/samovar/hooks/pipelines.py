"""Interception of the calls of a whole pipeline.

A pipeline is usually not a module, but its calls are intercepted the same way: its type is swapped for a subclass of
the same name. Each call becomes a `Run` (see `runs`), which calls the pipeline's hooks when it starts and ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import SettingError
from .handle import Handle
from .intercept import BareCopies, class_before, set_class
from .registry import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from .runs import HOOKS, PipelineHook, current_run, pipeline_hooks, running

_MODULE_HOOK = "samovar_run"


def hook_pipeline(pipeline: Any, name: str, hook: PipelineHook) -> Handle:
    """Attach a hook to a pipeline; a name that is taken is refused. With the last hook, every trace of us goes."""
    hooks = pipeline_hooks(pipeline)
    if name in hooks:
        raise SettingError(f"{type(pipeline).__name__} has a pipeline hook {name!r} already. Detach that one first.")
    undo = contextlib.ExitStack()
    try:
        undo.callback(_detach, weakref.ref(pipeline), name, hook)
        if not hooks:
            _install(pipeline)
    except TypeError as error:
        raise SettingError(
            f"A {type(pipeline).__name__} cannot be hooked as a pipeline ({error}). Hook its denoiser instead."
        ) from error
    vars(pipeline)[HOOKS] = {**hooks, name: hook}
    return Handle(undo)


def _install(pipeline: Any) -> None:
    if isinstance(pipeline, torch.nn.Module):
        HookRegistry.get_or_create(pipeline).register_hook(_MODULE_HOOK, _RunHook())
    else:
        cls: Any = type(pipeline)
        set_class(pipeline, _hooked_class(cls))


def _detach(reference: weakref.ref[Any], name: str, hook: PipelineHook) -> None:
    pipeline = reference()
    hooks = dict(pipeline_hooks(pipeline))
    if hooks.get(name) is not hook:
        return
    del hooks[name]
    vars(pipeline)[HOOKS] = hooks
    if not hooks:
        del vars(pipeline)[HOOKS]
        if isinstance(pipeline, torch.nn.Module):
            HookRegistry.get_or_create(pipeline).remove_hook(_MODULE_HOOK)
        else:
            set_class(pipeline, vars(type(pipeline)).get("_samovar_bare", type(pipeline)))


class _RunHook(ModelHook):
    """Makes the calls of a pipeline that is a module runs."""

    order = HookOrder.OUTERMOST

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_running(module):
            return NOT_BYPASSED
        with running(module):
            return module(*args, **kwargs)

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        vars(module).pop(HOOKS, None)  # Also if the registry was reset.
        return module


def _is_running(pipeline: Any) -> bool:
    """Whether the pipeline calls itself."""
    run = current_run()
    return run is not None and run.pipeline is pipeline


# ------------------------------------------------------------------------------------------------ hooked classes


@functools.cache
def _hooked_class(cls: Any) -> Any:
    if issubclass(cls, BareCopies):  # A pipeline that was made as type(pipe)(...) from a hooked one.
        return cls
    # To others the pipeline's class is what it was; pickle insists on that.
    body: dict[str, Any] = {"__class__": property(lambda self: cls, set_class)}
    call = getattr(cls, "__call__", None)  # noqa: B004
    if call is not None:
        body["__call__"] = _bracketed(call)
    for name in ("device", "_execution_device"):
        if isinstance(getattr(cls, name, None), property):
            body[name] = _device_property(getattr(cls, name))
    return class_before(cls, BareCopies, body)


def _bracketed(bare: Callable[..., Any]) -> Callable[..., Any]:
    """A pipeline's own `__call__`, with its signature, as a run."""
    names = list(inspect.signature(bare).parameters)[1:]

    @functools.wraps(bare)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.__class__.__call__  # Others may have put another one on the class since.
        # One that was made as type(pipe)(...) from a hooked pipeline has no hooks.
        if _is_running(self) or not pipeline_hooks(self):
            return own(self, *args, **kwargs)
        with running(self, dict(zip(names, args, strict=False)) | kwargs):
            return own(self, *args, **kwargs)

    return call


def _device_property(bare: property) -> property:
    """The pipeline's own device, unless a hook knows better."""

    def get(self: Any) -> Any:
        devices = (hook.execution_device for hook in pipeline_hooks(self).values())
        known = next((device for device in devices if device is not None), None)
        return bare.__get__(self) if known is None else known

    return property(get, bare.fset)
