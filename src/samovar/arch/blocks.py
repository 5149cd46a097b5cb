"""The repeated blocks of a transformer, and how much of the model they hold.

All is read from structure, without running anything: `lists` finds the stacks. What a block carries through is
declared, or `trace` learns it from one forward.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module, ModuleList

from ..core import nested
from ..core.errors import ModelError
from ..core.interop import WRAPPED_MODULE
from ..core.tensor_parts import num_bytes_of
from .declarations import BlockDeclaration, check_stacks, declaration_for
from .lists import Blocks, blocks_of, find_lists
from .modules import is_container, parameters_of, tensor_bytes, unwrapped

Place = int | str
"""The position or name of an argument."""
_ATTENTION = re.compile("attn|attention")
MIN_NAMED_SHARE = 0.01
"""The share of the weights from which a module outside of blocks is named."""


@dataclass(frozen=True)
class Stream:
    """One value that a block returns."""

    parameter: str | None
    """The block's parameter through which the next block takes it; None if it is not passed on."""


@dataclass(frozen=True)
class BlockStack:
    """A list of repeated blocks."""

    path: str
    """Where the list is; for a block that is in no list, where it is itself."""
    block_paths: tuple[str, ...]
    block_classes: tuple[str, ...]
    """The classes of its blocks, each once; nearly always one."""
    parameters: tuple[str, ...]
    """The parameters of a block's forward; the first block's where they differ."""
    streams: tuple[Stream, ...]
    """The values that a block returns, in order. Empty before a probe, unless they are declared."""
    num_bytes: int

    def __len__(self) -> int:
        return len(self.block_paths)

    @property
    def pattern(self) -> str:
        """The paths of its blocks as one, with a star for the part that differs."""
        return self.path if self.block_paths == (self.path,) else f"{self.path}.*"

    def modules(self, model: Module) -> tuple[Module, ...]:
        """The blocks as the model calls them, compiled or not; one that runs at two places comes twice."""
        return tuple(unwrapped(model).get_submodule(path) for path in self.block_paths)

    def places(self, block: Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Place]:
        """Where the arguments of a block's call are, by the stack's parameters."""
        own = parameters_of(block)
        # A block with other names than the first one still takes the same things in the same order.
        unlike = (name for name in own if name not in self.parameters)
        renamed = dict(zip(unlike, (name for name in self.parameters if name not in own), strict=False))
        given = dict(zip(own, range(len(args)), strict=False)) | {name: name for name in kwargs}
        return {renamed.get(name, name): place for name, place in given.items()}


@dataclass(frozen=True)
class Anatomy:
    """The stacks of blocks of a transformer."""

    model_class: str
    stacks: tuple[BlockStack, ...]
    """In the order in which they run; in the order of definition before a probe."""
    side: tuple[str, ...] = ()
    """Modules that run between the blocks of a stack and are not blocks themselves."""
    leader: str | None = None
    """The stack by whose input a step is judged."""


def output_values(output: Any) -> tuple[Any, ...]:
    """The output of a block as a tuple."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)):
        return tuple(output)
    raise ModelError(
        f"A block returned {type(output).__name__}; expected a tensor, a tuple or a list. Register an "
        "extractor for such a model."
    )


def in_form_of(output: Any, values: Sequence[Any]) -> Any:
    """Values in the form in which a block returned others."""
    return values[0] if isinstance(output, Tensor) else nested.sequence_like(output, list(values))


def find_anatomy(model: Module) -> Anatomy:
    """A transformer's anatomy, from structure and declarations."""
    model = unwrapped(model)
    declaration = declaration_for(model)
    declared = {path: blocks_of(path, model.get_submodule(path)) for path in declaration.stacks}
    lists = {path: blocks for path, blocks in (declared or find_lists(model)).items() if path not in declaration.side}
    check_stacks(model, declaration, lists)
    stacks = tuple(_read_stack(path, blocks, declaration) for path, blocks in lists.items())
    leader = declaration.leader or (stacks[0].path if stacks else None)
    return Anatomy(type(model).__name__, stacks, side=declaration.side, leader=leader)


def _read_stack(path: str, blocks: Blocks, declaration: BlockDeclaration) -> BlockStack:
    declared = declaration.carried.get(path, ())
    return BlockStack(
        path=path,
        block_paths=tuple(blocks),
        block_classes=tuple(dict.fromkeys(type(block).__name__ for block in blocks.values())),
        parameters=tuple(parameters_of(next(iter(blocks.values())))),
        streams=tuple(Stream(parameter) for parameter in declared),
        num_bytes=tensor_bytes(blocks.values()),
    )


def attention_modules(module: Module) -> dict[str, Module]:
    """The outermost attention modules within a module, by path; not the norms named after them."""
    found: dict[str, Module] = {}
    for path, part in module.named_modules():
        name, inside = path.rpartition(".")[2].lower(), path.startswith(tuple(f"{outer}." for outer in found))
        is_attention = _ATTENTION.search(f"{name} {type(part).__name__.lower()}") and "norm" not in name
        if path and is_attention and not inside and not is_container(part):
            found[path] = part
    return found


@dataclass(frozen=True)
class Coverage:
    """The share of a model's weights that its blocks hold. What is in no block runs at every step."""

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


def coverage(model: Module, anatomy: Anatomy) -> Coverage:
    """How much of a model the stacks of an anatomy hold. Tensors that several modules share count once."""
    model = unwrapped(model)
    paths = list(itertools.chain.from_iterable(stack.block_paths for stack in anatomy.stacks))
    blocks = ModuleList(map(model.get_submodule, paths))
    covered = set(map(id, (*blocks.parameters(), *blocks.buffers())))
    outside: Counter[str] = Counter()
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in covered:
            place = _outermost_without_blocks(path.replace(f"{WRAPPED_MODULE}.", ""), paths)
            outside[place] += num_bytes_of([tensor])
    total_bytes = tensor_bytes([model])
    large = [(path, size) for path, size in outside.most_common() if size >= max(1, MIN_NAMED_SHARE * total_bytes)]
    return Coverage(tensor_bytes([blocks]), total_bytes, tuple(large))


def _outermost_without_blocks(path: str, blocks: Sequence[str]) -> str:
    """The outermost module on the way to a tensor that holds no block; the tensor itself if there is none."""
    parts = path.split(".")
    places = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return next((place for place in places if not any(block.startswith(f"{place}.") for block in blocks)), path)
