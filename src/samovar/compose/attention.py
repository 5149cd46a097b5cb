"""Other kernels for attention, if one forward with them gives what the default gives.

diffusers knows many (its attention backends), each for some GPUs, dtypes and masks. Some round otherwise, and some fail
only when they run, or leave out a mask. So the first forward is tried with both, on the model's twin, and where they
do not agree the default stays.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from ..arch.modules import unwrapped
from ..core import nested
from ..core.errors import SettingError, nearest
from ..core.interop import attention_backends, use_attention
from ..hooks import NOT_BYPASSED, Handle, HookOrder, HookRegistry, ModelHook, install_hook
from ..trace.twin import TrialFailed, run_trial, twin_of

HOOK_NAME = "attention"
NAMES = {"flash3": "_flash_3", "cudnn": "_native_cudnn", "torch_flash": "_native_flash", "math": "_native_math",
         "efficient": "_native_efficient"}  # fmt: skip
"""Our names for backends that diffusers calls otherwise."""
OF_TORCH = frozenset(("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"))
"""Backends that choose among torch's own kernels, and so also choose for ranks that share a sequence."""
_LARGEST_DIFFERENCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_OF_16_BITS = 5e-2
_logger = logging.getLogger(__name__)


def read_attention(value: Any) -> str:
    """diffusers' name of a backend."""
    known = attention_backends()
    if not isinstance(value, str) or NAMES.get(value, value) not in known:
        names = sorted({*NAMES, *(name for name in known if not name.startswith("_"))})
        hint = nearest(str(value), names)
        raise SettingError(f"attention={value!r} is not a backend. {hint} All: {', '.join(names)}.", param="attention")
    return NAMES.get(value, value)


class AttentionHook(ModelHook, Handle):
    """Another attention in a denoiser, and the handle that takes it off."""

    order = HookOrder.OUTERMOST  # Ranks compare whole forwards, before they split them: so they all find the same.

    def __init__(self, name: str) -> None:
        Handle.__init__(self)
        self.name = name
        self.state = "not compared with the default yet"
        self._is_checked = False

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        try:
            self._undo.callback(use_attention(module, read_attention(self.name)))
        except (RuntimeError, ImportError, ValueError) as error:
            raise SettingError(f"attention={self.name!r} cannot be used here: {error}", param="attention") from error
        return module

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._is_checked and not torch.is_grad_enabled():
            self._is_checked = True
            problem = self._problem(module, args, kwargs)
            if problem is not None:
                self.state = f"not used: {problem}"
                self._undo.close()
                self._undo.callback(HookRegistry.get_or_create(module).remove_hook, HOOK_NAME)
                _logger.warning("attention=%r is %s.", self.name, self.state)
        return NOT_BYPASSED

    def _problem(self, module: torch.nn.Module, args: Any, kwargs: Any) -> str | None:
        """Why the attention cannot be used, if it cannot."""
        device = next((tensor.device for tensor in nested.tensors((args, kwargs))), None)
        if any(parameter.device != device for parameter in module.parameters()):
            self.state = "used, and not compared with the default: its weights are streamed"
            return None
        try:
            found = run_trial(twin_of(module, sharded=False), args, kwargs)
            with contextlib.ExitStack() as restore:
                restore.callback(use_attention(module, None))
                expected = run_trial(twin_of(module, sharded=False), args, kwargs)
        except TrialFailed as error:
            return f"a forward to compare it failed ({str(error).partition(chr(10))[0]})"
        difference = nested.difference(found, expected)
        dtypes = {tensor.dtype for tensor in nested.tensors(expected)}
        largest = max((_LARGEST_DIFFERENCE.get(dtype, _OF_16_BITS) for dtype in dtypes), default=0.0)
        if not difference <= largest:
            return f"the output differs from the default's by {difference:.1e} of its norm"
        self.state = f"used; the output differs from the default's by {difference:.1e} of its norm"
        return None


def apply_attention(module: torch.nn.Module, name: str) -> AttentionHook:
    """Use another attention in a denoiser, after the first forward has shown that it can be used."""
    hook = AttentionHook(name)
    install_hook(hook._undo, unwrapped(module), HOOK_NAME, hook)
    return hook
