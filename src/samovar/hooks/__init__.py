"""How is a call intercepted, and whose call is it?"""

from .branches import BranchHook, is_conditioning
from .context import BaseState, CallContext, StateManager, call_context, current_context
from .registry import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook

__all__ = [
    "NOT_BYPASSED",
    "BaseState",
    "BranchHook",
    "CallContext",
    "HookOrder",
    "HookRegistry",
    "ModelHook",
    "StateManager",
    "call_context",
    "current_context",
    "is_conditioning",
]
