"""Which repeated blocks is a transformer built of, and what do they pass on?

Read from structure, without running anything: `lists` finds the stacks; what a block carries through is
read off its signature and its return statement. `probe` confirms and completes this by one forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import ModelError, nearest
from .declarations import BlockDeclaration, check_stacks, declaration_for
from .lists import Blocks, blocks_of, find_lists
from .modules import is_container, parameters_of, tensor_bytes, unwrapped
from .source import returned_parameters

Kind = Literal["image", "text", "joint"]
Evidence = Literal["structure", "probe", "declaration"]


@dataclass(frozen=True)
class Stream:
    """One value that a block returns."""

    parameter: str | None
    """The block's parameter through which the next block takes it; None if it is not passed on."""
    kind: Kind | None = None
    """What its tokens are made of at the stack's entry: the inputs that are denoised ("image", of whatever
    kind), conditioning alone ("text"), or some of each ("joint"). None before a probe."""


@dataclass(frozen=True)
class BlockStack:
    """A list of repeated blocks."""

    path: str
    """Where the list is; for a block that is in no list, where it is itself."""
    block_paths: tuple[str, ...]
    block_classes: tuple[str, ...]
    """The classes of its blocks, each once; nearly always one."""
    parameters: tuple[str, ...]
    """What a block's forward takes; the first block's where they differ."""
    streams: tuple[Stream, ...]
    """What a block returns, in order. Empty where structure does not tell."""
    num_bytes: int
    evidence: Evidence = "structure"

    def __len__(self) -> int:
        return len(self.block_paths)

    @property
    def pattern(self) -> str:
        """The paths of its blocks as one, with a star for what is different in each."""
        return self.path if self.block_paths == (self.path,) else f"{self.path}.*"

    @property
    def carried(self) -> tuple[str, ...]:
        """The parameters that are carried from block to block."""
        return tuple(stream.parameter for stream in self.streams if stream.parameter is not None)

    def modules(self, model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
        """The blocks as the model calls them, compiled or not; one that runs at two places comes twice."""
        return tuple(unwrapped(model).get_submodule(path) for path in self.block_paths)

    def names(self, block: torch.nn.Module) -> dict[str, str]:
        """For each parameter of a block, the stack's own name for it."""
        own = parameters_of(block)
        # A block that names things otherwise than the first one still takes them in the same order.
        unlike = (name for name in own if name not in self.parameters)
        renamed = dict(zip(unlike, (name for name in self.parameters if name not in own), strict=False))
        return {name: renamed.get(name, name) for name in own}

    def arguments(self, block: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What a block was called with, by the stack's parameters."""
        names = self.names(block)
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        return {names.get(name, name): value for name, value in given.items()}

    def read(self, output: Any) -> dict[str, Any]:
        """The carried values in a block's output, by parameter."""
        return {stream.parameter: value for stream, value in self._streamed(output) if stream.parameter}

    def rebuild(self, output: Any, values: dict[str, Any]) -> Any:
        """A block's output with the carried values replaced, in the form the model expects."""
        return in_form_of(output, [values.get(s.parameter or "", value) for s, value in self._streamed(output)])

    def _streamed(self, output: Any) -> list[tuple[Stream, Any]]:
        values = output_values(output)
        if len(values) != len(self.streams):
            raise ModelError(
                f"A block of {self.path!r} returned {len(values)} values; {len(self.streams)} were expected. "
                "Probe the model again with the inputs it has now."
            )
        return list(zip(self.streams, values, strict=True))


@dataclass(frozen=True)
class Anatomy:
    """What a transformer is built of."""

    model_class: str
    stacks: tuple[BlockStack, ...]
    """In the order in which they run; in the order of definition before a probe."""
    side: tuple[str, ...] = ()
    """Modules that run between the blocks of a stack and are not blocks themselves."""
    idle: tuple[str, ...] = ()
    """Stacks that the probing forward did not run."""
    leader: str | None = None
    """The stack by whose input a step is judged."""

    @property
    def is_probed(self) -> bool:
        return any(stack.evidence == "probe" for stack in self.stacks)

    def stack(self, path: str) -> BlockStack:
        """The stack at a path."""
        for stack in self.stacks:
            if stack.path == path:
                return stack
        known = [stack.path for stack in self.stacks]
        raise ModelError(f"{self.model_class} has no stack of blocks at {path!r}. {nearest(path, known)}")


def output_values(output: Any) -> tuple[Any, ...]:
    """What a block returned, as a tuple."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if isinstance(output, (tuple, list)):
        return tuple(output)
    raise ModelError(
        f"A block returned {type(output).__name__}; a tensor, a tuple or a list was expected. Such a model needs "
        "an extractor of its own."
    )


def in_form_of(output: Any, values: Sequence[Any]) -> Any:
    """Values in the form in which a block returned others."""
    if isinstance(output, torch.Tensor):
        return values[0]
    is_named_tuple = hasattr(output, "_fields")
    return type(output)(*values) if is_named_tuple else type(output)(values)


def find_anatomy(model: torch.nn.Module) -> Anatomy:
    """A transformer's anatomy as far as structure and declarations tell."""
    model = unwrapped(model)
    declaration = declaration_for(model)
    declared = {path: blocks_of(path, model.get_submodule(path)) for path in declaration.stacks}
    lists = {path: blocks for path, blocks in (declared or find_lists(model)).items() if path not in declaration.side}
    check_stacks(model, declaration, lists)
    stacks = tuple(_read_stack(path, blocks, declaration) for path, blocks in lists.items())
    leader = declaration.leader or (stacks[0].path if stacks else None)
    return Anatomy(type(model).__name__, stacks, side=declaration.side, leader=leader)


def _is_attention(path: str, module: torch.nn.Module) -> bool:
    texts = (path.rpartition(".")[2].lower(), type(module).__name__.lower())
    return any(word in text for text in texts for word in ("attn", "attention"))


def attention_modules(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost modules within a module that attend to something, by path; not the norms named after them."""
    found: dict[str, torch.nn.Module] = {}
    for path, part in module.named_modules():
        name = path.rpartition(".")[2].lower()
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and not inside and "norm" not in name and not is_container(part) and _is_attention(path, part):
            found[path] = part
    return found


def _read_stack(path: str, blocks: Blocks, declaration: BlockDeclaration) -> BlockStack:
    first = next(iter(blocks.values()))
    parameters = tuple(parameters_of(first))
    declared = declaration.carried.get(path)
    carried = declared or returned_parameters(first, parameters)
    return BlockStack(
        path=path,
        block_paths=tuple(blocks),
        block_classes=tuple(dict.fromkeys(type(block).__name__ for block in blocks.values())),
        parameters=parameters,
        streams=tuple(Stream(parameter) for parameter in carried),
        num_bytes=tensor_bytes(blocks.values()),
        evidence="declaration" if declared else "structure",
    )
