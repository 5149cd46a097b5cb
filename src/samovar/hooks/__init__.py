"""Intercepted calls, and the request, branch and run that a call is part of."""

from .branches import BranchHook
from .context import BaseState, CallContext, StateManager, call_context, current_context
from .handle import Handle
from .intercept import is_watched, watched
from .pipelines import hook_pipeline
from .registry import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook, install_hook
from .roles import Role, Roles, role_by_name
from .runs import PipelineHook, Position, Run, current_run, pipeline_hooks, running

__all__ = [
    "NOT_BYPASSED",
    "BaseState",
    "BranchHook",
    "CallContext",
    "Handle",
    "HookOrder",
    "HookRegistry",
    "ModelHook",
    "PipelineHook",
    "Position",
    "Role",
    "Roles",
    "Run",
    "StateManager",
    "call_context",
    "current_context",
    "current_run",
    "hook_pipeline",
    "install_hook",
    "is_watched",
    "pipeline_hooks",
    "role_by_name",
    "running",
    "watched",
]
