"""What the tests of offload share: a holder of one model, and hooks that look on from inside and outside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import zoo
from samovar.arch import find_anatomy
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload

CASES = {case.id: case for case in zoo.load()}


def blocks_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    return {
        path: block
        for stack in find_anatomy(model).stacks
        for path, block in zip(stack.block_paths, stack.modules(model), strict=True)
    }


def blocks_on_device(offloaded: Offloaded) -> list[str]:
    """The streamed blocks that are on the device or on their way to it."""
    rings = [moving.ring for moving in offloaded._components.values() if moving.ring]
    return [block.name for ring in rings for block in ring.blocks]


class Holder:
    """The least that counts as a pipeline."""

    def __init__(self, **modules: torch.nn.Module) -> None:
        vars(self).update(modules)


def layerwise(pipeline: Any, *, lazy: bool = False, **config: Any) -> Offloaded:
    return apply_offload(pipeline, OffloadConfig("layerwise", **config), stage=HostStage(lazy=lazy))


class Onlooker(ModelHook):
    """Sits inside all other hooks of a block and sees where its weights are while it computes."""

    def __init__(self, offloaded: Offloaded, path: str, log: list[tuple[str, bool, int]]) -> None:
        self._offloaded, self._path, self._log = offloaded, path, log

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        is_here = all(map(self._offloaded.stage.is_here, (*module.parameters(), *module.buffers())))
        self._log.append((self._path, is_here, len(blocks_on_device(self._offloaded))))
        return args, kwargs


class Skip(ModelHook):
    """What a cache does: answers for a block with what it returned before, when it is switched on."""

    order = HookOrder.CACHE

    def __init__(self, switch: dict[str, bool]) -> None:
        self._switch, self._output = switch, None

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._output if self._switch["on"] else NOT_BYPASSED

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._output = output
        return output


@contextmanager
def hooked(blocks: dict[str, torch.nn.Module], make: Any) -> Iterator[None]:
    """A hook on each block, made from its path."""
    for path, block in blocks.items():
        HookRegistry.get_or_create(block).register_hook("test", make(path))
    try:
        yield
    finally:
        for block in blocks.values():
            HookRegistry.get_or_create(block).remove_hook("test")
