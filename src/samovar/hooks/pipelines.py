"""When does a run of a pipeline begin and end, at which step is it, and where does it compute?

A pipeline is not a module, but its calls are intercepted the same way: its type is swapped for a
subclass of the same name. Around every call there is a `Run`, which is a request of its own unless the
caller named one: so what hooks remember of a run is found again by its calls alone, and is gone when
the run ends, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ..errors import SettingError
from ..other_libraries import pipeline_steps, scheduler_step
from .context import call_context, current_context
from .registry import HookOrder, HookRegistry, ModelHook

_ENTRY = "_samovar_pipeline_hooks"
_MODULE_HOOK = "samovar_run"
_MOST_LEVELS = 3
"""How deep modules are looked for in a pipeline."""
_class_slot: Any = object.__dict__["__class__"]


class Position(NamedTuple):
    """How far a run is."""

    step: int
    """The index of the running step among the scheduler's, which starts above 0 where a run starts half-way."""
    total: int
    sigma: float | None
    """How much noise there is at this step, where the scheduler says so."""


class Run:
    """One call of a pipeline."""

    def __init__(self, pipeline: Any, request: Hashable, outer: Run | None = None) -> None:
        self._pipeline = pipeline
        self.request = request
        self.outer = outer
        """The run in which this one takes place, if there is one."""
        self._held: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._timesteps: Any = None
        self._sigmas: list[float] = []

    @property
    def pipeline(self) -> Any:
        """Whose call it is."""
        return self._pipeline

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether the module is part of the pipeline."""
        if module not in self._held:
            self._held[module] = holds(self.pipeline, module)
        return self._held[module]

    def position(self) -> Position | None:
        """Where the run is, as its scheduler says; None where it does not. A device is waited for once a loop."""
        scheduler: Any = getattr(self.pipeline, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        step = scheduler_step(scheduler)
        if timesteps is None or step is None:
            return None
        return Position(step, len(timesteps), self._sigma(scheduler, timesteps, step))

    def _sigma(self, scheduler: Any, timesteps: Any, step: int) -> float | None:
        if timesteps is not self._timesteps:  # Read once a loop: schedulers may keep them on a device.
            sigmas = getattr(scheduler, "sigmas", None)
            self._timesteps, self._sigmas = timesteps, _numbers(sigmas)
        return float(self._sigmas[step]) if 0 <= step < len(self._sigmas) else None

    def loop(self) -> Any:
        """What tells one loop over steps from the next in the same run: the times that were set for it."""
        return getattr(getattr(self.pipeline, "scheduler", None), "timesteps", None)

    def total(self) -> int | None:
        """How many steps the run takes, as far as the pipeline says."""
        named = pipeline_steps(self.pipeline)
        if named is not None:
            return named
        timesteps = getattr(getattr(self.pipeline, "scheduler", None), "timesteps", None)
        return None if timesteps is None else len(timesteps)


def holds(pipeline: Any, module: torch.nn.Module) -> bool:
    """Whether a module is part of a pipeline, as an attribute, in a container, or inside another module."""
    return any(found is module for found in _modules(pipeline, _MOST_LEVELS))


def _modules(value: Any, levels: int) -> Iterator[torch.nn.Module]:
    if isinstance(value, torch.nn.Module):
        yield from value.modules()
    elif levels and isinstance(value, (list, tuple, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _modules(part, levels - 1)
    elif levels and not isinstance(value, (torch.Tensor, type)):
        for part in list(getattr(value, "__dict__", {}).values()):
            yield from _modules(part, levels - 1)


class PipelineHook:
    """What is attached to a whole pipeline."""

    execution_device: torch.device | None = None
    """Where the pipeline makes its latents and runs, if not where its modules happen to lie."""

    def start_run(self, run: Run) -> None:
        """Called when the pipeline is called."""

    def end_run(self, run: Run) -> None:
        """Called when the call returns or raises."""


_run: ContextVar[Run | None] = ContextVar("samovar_run", default=None)


def current_run() -> Run | None:
    """The innermost run that the running code is part of."""
    return _run.get()


def current_step() -> int | None:
    """The step at which that run is, where its scheduler says so."""
    run = _run.get()
    position = None if run is None else run.position()
    return None if position is None else position.step


def hook_pipeline(pipeline: Any, name: str, hook: PipelineHook) -> None:
    """Attach a hook to a pipeline. A name that is taken is refused."""
    if not hasattr(pipeline, "__dict__") or isinstance(pipeline, type):
        raise _cannot_be_hooked(pipeline, "it has no attributes of its own")
    hooks = pipeline_hooks(pipeline)
    if name in hooks:
        raise SettingError(
            f"{type(pipeline).__name__} has a pipeline hook {name!r} already. Remove it first: unhook_pipeline."
        )
    if not hooks:
        _install(pipeline)
    _set_hooks(pipeline, {**hooks, name: hook})


def unhook_pipeline(pipeline: Any, name: str) -> None:
    """Detach a hook; a name that is not there is no error. With the last one, every trace of us goes."""
    hooks = {known: hook for known, hook in pipeline_hooks(pipeline).items() if known != name}
    if hooks:
        _set_hooks(pipeline, hooks)
    elif pipeline_hooks(pipeline):
        _uninstall(pipeline)


def pipeline_hooks(pipeline: Any) -> dict[str, PipelineHook]:
    """The hooks of a pipeline by name, in the order in which they were attached."""
    if isinstance(pipeline, torch.nn.Module):
        hook = HookRegistry.get_or_create(pipeline).get_hook(_MODULE_HOOK)
        return hook.hooks if isinstance(hook, _RunHook) else {}
    hooks: dict[str, PipelineHook] = getattr(pipeline, "__dict__", {}).get(_ENTRY, {})
    return hooks


def _set_hooks(pipeline: Any, hooks: dict[str, PipelineHook]) -> None:
    if isinstance(pipeline, torch.nn.Module):
        run_hook = HookRegistry.get_or_create(pipeline).get_hook(_MODULE_HOOK)
        assert isinstance(run_hook, _RunHook)
        run_hook.hooks = hooks
    else:
        vars(pipeline)[_ENTRY] = hooks


@contextlib.contextmanager
def running(pipeline: Any) -> Iterator[Run]:
    """What is done around a call of a hooked pipeline; for those who drive one step by step themselves."""
    for watch in run_watches:
        watch(pipeline)
    outer = current_run()
    run = Run(pipeline, own_request(outer), outer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(call_context(request=run.request))
        stack.callback(_run.reset, _run.set(run))
        started = list(pipeline_hooks(pipeline).values())
        for hook in started:
            stack.callback(hook.end_run, run)
            hook.start_run(run)
        try:
            yield run
        finally:  # Hooks of a pipeline that was adopted during its run.
            for hook in pipeline_hooks(pipeline).values():
                if hook not in started:
                    stack.callback(hook.end_run, run)


run_watches: list[Callable[[Any], None]] = []
"""Called with a pipeline before a run of it begins."""


def own_request(outer: Run | None) -> Hashable:
    """The request of a new run: what the caller has named, or a new one."""
    request = current_context().request
    is_unnamed = request is None or (outer is not None and outer.request == request)
    return _Anonymous() if is_unnamed else request


class _Anonymous:
    """The request of a call for which nobody named one."""

    def __repr__(self) -> str:
        return f"<run {id(self):x}>"


class _RunHook(ModelHook):
    """Brackets the calls of a pipeline that is a module."""

    order = HookOrder.OUTERMOST

    def __init__(self) -> None:
        self.hooks: dict[str, PipelineHook] = {}
        self._thread = threading.local()

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        stack, run = contextlib.ExitStack(), current_run()
        if run is None or run.pipeline is not module:
            stack.enter_context(running(module))
        vars(self._thread).setdefault("open", []).append(stack)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._thread.open.pop().close()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._thread.open.pop().close()


class _HookedPipeline:
    """Put before a pipeline's class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the bare pipeline, and need no Samovar to be read."""
        reduced: Any = super().__reduce_ex__(protocol)
        rebuild, arguments, *rest = reduced
        own, bare = type(self), type(self).__bases__[-1]
        if rest and isinstance(rest[0], dict):
            rest[0] = {key: value for key, value in rest[0].items() if key != _ENTRY}
        return (rebuild, tuple(bare if item is own else item for item in arguments), *rest)


def _bracketed(bare: Callable[..., Any]) -> Callable[..., Any]:
    """A pipeline's own `__call__`, with its signature, as a run."""

    @functools.wraps(bare)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, own = current_run(), self.__class__.__call__  # Others may have put another one on the class since.
        if run is not None and run.pipeline is self:
            return own(self, *args, **kwargs)
        with running(self):
            return own(self, *args, **kwargs)

    return call


def _device_property(cls: type, name: str) -> property:
    """What a pipeline says of its device, unless a hook knows better."""

    def get(self: Any) -> Any:
        devices = (hook.execution_device for hook in pipeline_hooks(self).values())
        known = next((device for device in devices if device is not None), None)
        if known is not None:
            return known
        own = getattr(cls, name, None)
        return own.__get__(self) if isinstance(own, property) else vars(self).get(name, own)

    def put(self: Any, value: Any) -> None:
        own = getattr(cls, name, None)
        if isinstance(own, property):
            own.__set__(self, value)
        else:
            vars(self)[name] = value

    return property(get, put)


_hooked_classes: dict[type, type] = {}


def _hooked_class(cls: type) -> type:
    if issubclass(cls, _HookedPipeline):  # A pipeline that was made as type(pipe)(...) of a hooked one.
        return cls
    if cls not in _hooked_classes:
        body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        # To others the pipeline's class is what it was; pickle insists on that.
        body["__class__"] = property(lambda self: cls, _class_slot.__set__)
        call = getattr(cls, "__call__", None)  # noqa: B004
        if call is not None:
            body["__call__"] = _bracketed(call)
        for name in ("device", "_execution_device"):
            if hasattr(cls, name):
                body[name] = _device_property(cls, name)
        make_class: Any = type(cls)
        _hooked_classes[cls] = make_class(cls.__name__, (_HookedPipeline, cls), body)
    return _hooked_classes[cls]


def _install(pipeline: Any) -> None:
    if isinstance(pipeline, torch.nn.Module):
        HookRegistry.get_or_create(pipeline).register_hook(_MODULE_HOOK, _RunHook())
        return
    try:
        _class_slot.__set__(pipeline, _hooked_class(type(pipeline)))
    except TypeError as error:
        raise _cannot_be_hooked(pipeline, str(error)) from error


def _uninstall(pipeline: Any) -> None:
    if isinstance(pipeline, torch.nn.Module):
        HookRegistry.get_or_create(pipeline).remove_hook(_MODULE_HOOK)
    else:
        del vars(pipeline)[_ENTRY]
        _class_slot.__set__(pipeline, type(pipeline).__bases__[-1])


def _cannot_be_hooked(pipeline: Any, why: str) -> SettingError:
    return SettingError(
        f"A {type(pipeline).__name__} cannot be hooked as a pipeline ({why}). Hook its denoiser instead."
    )


def _numbers(sigmas: Any) -> list[float]:
    return sigmas.tolist() if isinstance(sigmas, torch.Tensor) and not sigmas.is_meta else []
