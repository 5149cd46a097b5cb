"""Prompt embeddings that are kept, so that a prompt that was encoded before wakes no encoder.

Kept are the outputs of a pipeline's own `encode_prompt`, on the host, by all that they depend on: its arguments, the
pipeline's settings, its tokenizers, the state of its modules and their adapters. What depends on anything that cannot
be compared, such as an image, or draws random numbers, is encoded each time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..core import nested
from ..core.interop import OF_A_CALL, kernel_settings
from ..core.tensor_parts import num_bytes_of
from ..trace.model_state import Generation
from .calling import random_state, replaced

MAX_BYTES = 2**28
_ENCODE = "encode_prompt"


class Embeddings:
    """What prompts were encoded to. The least recently used are forgotten first."""

    def __init__(self, wait: Callable[[], None] = lambda: None, max_bytes: int = MAX_BYTES) -> None:
        """`wait` returns when the encoders may be called; others may have encoded the same meanwhile."""
        self._wait, self._max_bytes = wait, max_bytes
        self._generation = functools.cache(lambda module: Generation(module, module.modules))
        self._stored: OrderedDict[Hashable, tuple[Any, list[torch.device]]] = OrderedDict()

    def kept(self, pipeline: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, the pipeline finds what it has encoded before."""
        encode = getattr(pipeline, _ENCODE, None)
        if encode is None:
            return contextlib.nullcontext()

        @functools.wraps(encode)
        def remembered(*args: Any, **kwargs: Any) -> Any:
            key = self._key(pipeline, (args, kwargs))
            if key not in self._stored:
                self._wait()
            if key in self._stored:
                return self._found(key)
            before = _settings(pipeline), random_state()
            output = encode(*args, **kwargs)
            is_pure = nested.is_transparent(output) and nested.equal(before, (_settings(pipeline), random_state()))
            if key is not None and is_pure:
                self._store(key, output)
            return output

        return replaced(pipeline, _ENCODE, remembered)

    def _key(self, pipeline: Any, given: Any) -> Hashable:
        """All that the embeddings depend on; None if something of it cannot be compared."""
        if not _is_plain(given):
            return None
        parts = [part for part in pipeline.components.values() if part is not None]
        states = [(part, self._generation(part).check()) for part in parts if isinstance(part, torch.nn.Module)]
        tokenizers = [(id(part), len(part)) for part in parts if hasattr(part, "add_tokens")]
        plain = given, tokenizers, _settings(pipeline), kernel_settings()
        return *states, nested.signature(plain, exact=True)

    def _store(self, key: Hashable, output: Any) -> None:
        devices = [tensor.device for tensor in nested.tensors(output)]
        self._stored[key] = nested.map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True), output), devices
        while num_bytes_of(nested.tensors(list(self._stored.values()))) > self._max_bytes:
            self._stored.popitem(last=False)

    def _found(self, key: Hashable) -> Any:
        self._stored.move_to_end(key)
        output, devices = self._stored[key]
        places = iter(devices)
        return nested.map_tensors(lambda tensor: tensor.to(next(places), copy=True), output)


def _settings(pipeline: Any) -> dict[str, Any]:
    """The plain attributes of a pipeline, such as the guidance that it was called with."""
    return {name: value for name, value in vars(pipeline).items() if name not in OF_A_CALL and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    return isinstance(value, nested.ATOMS) if parts is None else all(map(_is_plain, parts))
