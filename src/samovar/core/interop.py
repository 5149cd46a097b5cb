"""What other libraries have written on a module, a pipeline or a scheduler.

Their marks are not part of any type and can only be read by name. The names stand in this file and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

_TASK_TABLE = re.compile(r"AUTO_([A-Z0-9]+)_PIPELINES_MAPPING")

# ------------------------------------------------------------------------------------------------ torch.compile

COMPILED_CALL = "_compiled_call_impl"
"""Where `Module.compile` keeps the compiled call, in the module's `__dict__`."""
WRAPPED_MODULE = "_orig_mod"
"""Where `torch.compile(module)` keeps the module that it was given."""


def compiled_call(module: torch.nn.Module) -> Any:
    """What `Module.compile` made of a module's call; None if the module is not compiled that way."""
    return module._compiled_call_impl


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was compiled, by `torch.compile(module)` or by `module.compile()`."""
    return WRAPPED_MODULE in module._modules or compiled_call(module) is not None


# ------------------------------------------------------------------------------------------------ torch


def copy_each(targets: list[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its target: of one dtype and device, in one kernel."""
    torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def memory_of(tensor: torch.Tensor) -> int:
    """What two tensors have in common that are views of one piece of memory, as long as either lives."""
    return int(tensor.untyped_storage()._cdata)


def end_pool(device: torch.device, pool: Any) -> None:
    """Have torch no longer allocate in the memory pool of a capture that failed."""
    with contextlib.suppress(RuntimeError):  # It does not.
        torch._C._cuda_endAllocateToPool(device.index, pool)


def modes() -> tuple[bool, torch.device | None]:
    """Whether somebody, such as a profiler, sees each operation on this thread; and where tensors are made if nobody
    says where, if that was chosen, which is a mode as well."""
    is_seen, count = bool(torch._C._len_torch_dispatch_stack()), torch._C._len_torch_function_stack()
    if not count:
        return is_seen, None
    from torch import overrides
    from torch.utils._device import DeviceContext

    stack: Any = overrides._get_current_function_mode_stack
    devices = [mode.device for mode in stack() if isinstance(mode, DeviceContext)]
    return is_seen or count > len(devices), next(reversed(devices), None)


def global_hooks() -> list[Any]:
    """Tables of the functions that torch calls around every module; all empty if nobody has asked for it."""
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(torch.nn.modules.module, f"_global_{kind}") for kind in kinds]


def kernel_settings() -> tuple[Any, ...]:
    """Torch's global settings that decide which kernels run, and diffusers' choice of attention."""
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    registry = getattr(dispatch, "_AttentionBackendRegistry", None)
    return None if registry is None else registry._active_backend, *map(operator.call, _KERNEL_SETTINGS)


_SETTING = re.compile(
    r"_get_(\w*sdp_\w+|cudnn_(enabled|benchmark|deterministic|depthwise_kernel)|deterministic_\w+"
    r"|cublas_allow_\w+_(reduction|accumulation)|(blas|linalg)_preferred_backend)"
)
_KERNEL_SETTINGS: tuple[Any, ...] = (
    *(getattr(torch._C, name) for name in dir(torch._C) if _SETTING.fullmatch(name)),
    # What may be computed with fewer bits than float32 has, such as in TF32.
    *(functools.partial(torch._C._get_fp32_precision_getter, *of)
      for of in (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"))),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ accelerate, diffusers

FORWARD_WRAPPERS = frozenset(("_hf_hook", "_old_forward", "_diffusers_hook"))
"""What accelerate and diffusers put into a module's `__dict__` when they replace its forward."""
_HELPERS = ("layer_execution_tracker", "lazy_", "peft_autocast")
"""How the names of such hooks begin."""
CAPTURING_OUTPUTS = "_output_capturing_hooks_installed"
"""Where transformers notes that a model has the torch hooks which collect its hidden states."""
SP_PLAN, CP_PLAN = "_sp_plan", "_cp_plan"
"""Where vllm-omni and diffusers declare how a model's inputs are split over ranks."""


def accelerate_hook(module: torch.nn.Module) -> Any:
    """The hook that accelerate has on a module, or None."""
    return vars(module).get("_hf_hook")


def accelerate_weights(module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
    """Where accelerate keeps the weights of a module that holds none itself."""
    weights: Mapping[str, torch.Tensor] | None = getattr(accelerate_hook(module), "weights_map", None)
    return weights


def diffusers_hooks(module: torch.nn.Module) -> Mapping[str, Any]:
    """The hooks that diffusers has on a module, by name."""
    hooks: Mapping[str, Any] = getattr(vars(module).get("_diffusers_hook"), "hooks", {})
    return hooks


def is_helper(name: str) -> bool:
    """Whether a hook of diffusers only helps another one, or does the same at every call."""
    return name.startswith(_HELPERS)


def compute_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype in which a module computes, where diffusers stores its weights in another (layerwise casting)."""
    dtype: torch.dtype | None = getattr(diffusers_hooks(module).get("layerwise_casting"), "compute_dtype", None)
    return dtype


def attention_backend(module: torch.nn.Module) -> str | None:
    """The attention that was chosen by diffusers' `set_attention_backend`."""
    backend = getattr(getattr(module, "processor", None), "_attention_backend", None)
    return None if backend is None else str(getattr(backend, "value", backend))


def attention_backends() -> frozenset[str]:
    """The names of diffusers' attention backends."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    return frozenset(backend.value for backend in AttentionBackendName)


def use_attention(model: Any, name: str | None) -> Callable[[], None]:
    """Use a backend of diffusers in one model, or its default; returns what restores it. RuntimeError, ImportError or
    ValueError if it cannot be used here. diffusers would also make it the default of all other models."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    if not hasattr(model, "set_attention_backend"):
        raise ValueError(f"a {type(model).__name__} is no model of diffusers, and has no choice of attention")
    processors = [vars(module).get("processor") for module in model.modules()]
    before = [(one, one._attention_backend) for one in processors if hasattr(one, "_attention_backend")]
    if not before:
        raise ValueError(f"{type(model).__name__} computes attention itself, and leaves no choice")
    active = registry._active_backend

    def restore() -> None:
        for processor, backend in before:
            processor._attention_backend = backend

    if name is None:
        for processor, _ in before:
            processor._attention_backend = None
        return restore
    try:
        model.set_attention_backend(name)
    finally:
        registry.set_active_backend(active)
    return restore


def declared_plans(model: Any) -> dict[str, Any]:
    """How a model, or its class, declares that its inputs are split over ranks, by the name of the declaration."""
    plans = {name: getattr(model, name, None) for name in (SP_PLAN, CP_PLAN)}
    return {name: plan for name, plan in plans.items() if plan}


def scheduler_step(scheduler: Any) -> int | None:
    """The index of the step at which a scheduler of diffusers is; None where the scheduler does not count."""
    if not hasattr(scheduler, "_step_index"):
        return None
    step = scheduler._step_index
    if step is None:  # Before the first step.
        step = getattr(scheduler, "_begin_index", None) or 0
    return int(step)


OF_A_CALL = ("_num_timesteps", "_current_timestep", "_interrupt", "_progress_bar_config")
"""What pipelines of diffusers leave in themselves when a call ends, and what is shown of it."""


def pipeline_steps(pipeline: Any) -> int | None:
    """How many steps a pipeline of diffusers says that its run takes."""
    steps = getattr(pipeline, "_num_timesteps", None)
    return steps if isinstance(steps, int) else None


def kept_in_float32(model: torch.nn.Module, dtype: torch.dtype | None = None) -> frozenset[str]:
    """Names of modules that a model of diffusers or transformers keeps in float32, anywhere in a path: in any dtype, or
    where it is loaded in this one."""
    always = _strings(model, "_keep_in_fp32_modules_strict")
    is_exempt = dtype is torch.bfloat16 and type(model).__module__.startswith("transformers.")
    return frozenset(always if is_exempt else (*always, *_strings(model, "_keep_in_fp32_modules")))


# ------------------------------------------------------------------------------------------------ cache-dit


def has_cache_dit(part: Any) -> bool:
    """Whether cache-dit is enabled on a pipeline or a model."""
    return bool(getattr(part, "_is_cached", False))


# ------------------------------------------------------------------------------------------------ hints about blocks


def repeated_blocks(model: torch.nn.Module) -> tuple[str, ...]:
    """The classes that diffusers compiles one by one: blocks, wherever they come in a list."""
    return _strings(model, "_repeated_blocks")


def streamed_lists(model: torch.nn.Module) -> dict[str, str]:
    """The paths of lists whose members vllm-omni offloads one by one, each with the attribute that names it."""
    attributes = ("_layerwise_offload_blocks_attrs", "_layerwise_offload_blocks_attr")
    return {path: attribute for attribute in attributes for path in _strings(model, attribute)}


def _strings(model: torch.nn.Module, attribute: str) -> tuple[str, ...]:
    value = getattr(model, attribute, None)
    if isinstance(value, str):
        return (value,)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, (list, tuple, set)) else ()


# ------------------------------------------------------------------------------------------------ tasks


def pipelines_by_task() -> dict[str, dict[str, Any]]:
    """diffusers' tables of pipelines: for each task, the class of each family."""
    from diffusers.pipelines import auto_pipeline

    tables = {match[1]: name for name in vars(auto_pipeline) if (match := _TASK_TABLE.fullmatch(name))}
    words = {"TEXT2IMAGE": "text2img", "IMAGE2IMAGE": "img2img"}
    return {words.get(task, task.lower()): dict(getattr(auto_pipeline, name)) for task, name in tables.items()}
