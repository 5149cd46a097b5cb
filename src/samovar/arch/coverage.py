"""How much of a model lies in its blocks, and where is the rest? What is in no block runs at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .blocks import Anatomy
from .modules import tensor_bytes, unwrapped

_LEAST = 0.01
"""The share of the weights below which a module is not worth naming."""


@dataclass(frozen=True)
class Coverage:
    """Which share of a model's weights the blocks of its stacks hold. `str` of it is for people."""

    covered_bytes: int
    total_bytes: int
    uncovered: tuple[tuple[str, int], ...]
    """The larger modules and parameters outside, by path with their bytes, the largest first."""

    @property
    def share(self) -> float:
        """From 0 to 1; a model without weights is covered."""
        return self.covered_bytes / self.total_bytes if self.total_bytes else 1.0

    def __str__(self) -> str:
        outside = ", ".join(f"{path} {num_bytes / self.total_bytes:.1%}" for path, num_bytes in self.uncovered)
        text = f"blocks hold {self.share:.1%} of the weights{f'; outside: {outside}' if outside else ''}"
        return text.replace("%", " %")


def coverage(model: torch.nn.Module, anatomy: Anatomy) -> Coverage:
    """How much of a model the stacks of an anatomy hold. Tensors that several modules share count once."""
    model = unwrapped(model)
    paths = [path for stack in anatomy.stacks for path in stack.block_paths]
    blocks = [model.get_submodule(path) for path in paths]
    covered_bytes, total_bytes = tensor_bytes(blocks), tensor_bytes([model])
    seen = {id(tensor) for block in blocks for tensor in _tensors(block)}
    found = {path: _unseen_bytes(tensors, seen) for path, tensors in _outside(model, set(paths), "")}
    large = ((path, num_bytes) for path, num_bytes in found.items() if num_bytes >= max(1, _LEAST * total_bytes))
    return Coverage(covered_bytes, total_bytes, tuple(sorted(large, key=lambda item: -item[1])))


def _outside(module: torch.nn.Module, blocks: set[str], path: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The largest modules that hold no block, and what the modules around blocks hold themselves."""
    prefix = f"{path}." if path else ""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    yield from ((f"{prefix}{name}", [tensor]) for name, tensor in own)
    for name, child in module.named_children():
        child_path = f"{prefix}{name}"
        if any(block.startswith(f"{child_path}.") for block in blocks):
            yield from _outside(unwrapped(child), blocks, child_path)
        elif child_path not in blocks:
            yield child_path, list(_tensors(child))


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _unseen_bytes(tensors: list[torch.Tensor], seen: set[int]) -> int:
    num_bytes = 0
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            num_bytes += tensor.numel() * tensor.element_size()
    return num_bytes
