"""Which repeated blocks is a transformer built of, and what do they pass on?

Read from structure, without running anything: a stack is a ModuleList (or ModuleDict) whose children
all attend to something; what a block carries through is read off its signature and its return
statement. `probe` confirms and completes this by one forward.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..errors import ModelError
from .components import tensor_bytes
from .declarations import BlockDeclaration, declaration_for

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
    block_paths: tuple[str, ...]
    block_classes: tuple[str, ...]
    """The classes of its blocks, each once; nearly always one."""
    parameters: tuple[str, ...]
    """What a block's forward takes."""
    streams: tuple[Stream, ...]
    """What a block returns, in order. Empty where structure does not tell."""
    num_bytes: int
    evidence: Evidence = "structure"

    def __len__(self) -> int:
        return len(self.block_paths)

    @property
    def carried(self) -> tuple[str, ...]:
        """The parameters that are carried from block to block."""
        return tuple(stream.parameter for stream in self.streams if stream.parameter is not None)

    def modules(self, model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
        """The blocks themselves."""
        return tuple(model.get_submodule(path) for path in self.block_paths)

    def read(self, output: Any) -> dict[str, Any]:
        """The carried values in a block's output, by parameter."""
        values = output_values(output)
        if len(values) != len(self.streams):
            raise ModelError(
                f"A block of {self.path!r} returned {len(values)} values; {len(self.streams)} were expected. "
                "Probe the model again with the inputs it has now."
            )
        return {s.parameter: value for s, value in zip(self.streams, values, strict=True) if s.parameter}

    def rebuild(self, output: Any, values: dict[str, Any]) -> Any:
        """A block's output with the carried values replaced, in the form the model expects."""
        old = output_values(output)
        new = [values.get(s.parameter, v) if s.parameter else v for s, v in zip(self.streams, old, strict=True)]
        return new[0] if isinstance(output, torch.Tensor) else type(output)(new)


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
        return next(stack for stack in self.stacks if stack.path == path)


def output_values(output: Any) -> tuple[Any, ...]:
    """What a block returned, as a tuple."""
    if isinstance(output, torch.Tensor):
        return (output,)
    if type(output) in (tuple, list):
        return tuple(output)
    raise ModelError(
        f"A block returned {type(output).__name__}; a tensor, a tuple or a list was expected. Such a model needs "
        "an extractor of its own."
    )


def find_anatomy(model: torch.nn.Module) -> Anatomy:
    """A transformer's anatomy as far as structure and declarations tell."""
    declaration = declaration_for(model)
    lists = [(path, model.get_submodule(path)) for path in declaration.stacks] or list(_block_lists(model))
    stacks = tuple(_read_stack(path, blocks, declaration) for path, blocks in lists if path not in declaration.side)
    leader = declaration.leader or (stacks[0].path if stacks else None)
    return Anatomy(type(model).__name__, stacks, side=declaration.side, leader=leader)


def _block_lists(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost containers of blocks, in order of definition."""
    marked = {*(getattr(model, "_repeated_blocks", None) or ()), *(getattr(model, "_no_split_modules", None) or ())}
    return _block_lists_in(model, marked)


def _block_lists_in(module: torch.nn.Module, marked: set[str], path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if is_container(child) and _holds_blocks(list(child.children()), marked):
            yield child_path, child
        else:
            yield from _block_lists_in(child, marked, child_path)


def is_container(module: torch.nn.Module) -> bool:
    """Whether a module only holds others and is never called itself."""
    return isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))


def _holds_blocks(children: Sequence[torch.nn.Module], marked: set[str]) -> bool:
    # A list of one is a stack only if diffusers' own metadata says so: a single attention module in a
    # list of adapters looks the same.
    enough = len(children) > 1 or any(type(child).__name__ in marked for child in children)
    blocks = enough and all(not is_container(child) and _attends(child) for child in children)
    # Whole transformers side by side are no blocks: their own stacks are.
    return blocks and not all(any(_block_lists_in(child, marked)) for child in children)


def _attends(module: torch.nn.Module) -> bool:
    return any(
        word in text.lower()
        for name, part in module.named_modules()
        for text in (name.rpartition(".")[2], type(part).__name__)
        for word in ("attn", "attention")
    )


def _read_stack(path: str, blocks: torch.nn.Module, declaration: BlockDeclaration) -> BlockStack:
    names = [name for name, _ in blocks.named_children()]
    children = list(blocks.children())
    parameters = tuple(inspect.signature(children[0].forward).parameters)
    declared = declaration.carried.get(path)
    carried = declared or _returned_parameters(children[0], parameters)
    return BlockStack(
        path=path,
        block_paths=tuple(f"{path}.{name}" for name in names),
        block_classes=tuple(dict.fromkeys(type(child).__name__ for child in children)),
        parameters=parameters,
        streams=tuple(Stream(parameter) for parameter in carried),
        num_bytes=tensor_bytes(children),
        evidence="declaration" if declared else "structure",
    )


def _returned_parameters(block: torch.nn.Module, parameters: Sequence[str]) -> tuple[str | None, ...]:
    """What the last return statement of a block's forward names, where these are its parameters."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(block).forward)))
    except (OSError, TypeError):  # No source: built at run time, or compiled.
        return ()
    function = ast.parse(source).body[0]
    returns = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    if not returns:
        return ()
    last = max(returns, key=lambda value: value.lineno)
    values = last.elts if isinstance(last, (ast.Tuple, ast.List)) else [last]
    names = [value.id if isinstance(value, ast.Name) and value.id in parameters else None for value in values]
    return tuple(names) if any(names) else ()


def with_streams(stack: BlockStack, streams: tuple[Stream, ...]) -> BlockStack:
    """The stack as a probe saw it; what was declared stays as declared."""
    if stack.evidence == "declaration":
        kinds = [stream.kind for stream in streams]
        streams = tuple(replace(s, kind=kind) for s, kind in zip(stack.streams, kinds, strict=True))
        return replace(stack, streams=streams)
    return replace(stack, streams=streams, evidence="probe")
