"""Which repeated blocks is a transformer built of, and what do they pass on?

Read from structure, without running anything: a stack is a ModuleList (or ModuleDict) whose children
all attend to something; what a block carries through is read off its signature and its return
statement. `probe` confirms and completes this by one forward.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import ModelError, nearest
from .declarations import BlockDeclaration, check_stacks, declaration_for
from .modules import is_container, members, parameters_of, tensor_bytes, unwrapped

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
    """What a block's forward takes; the first block's where they differ."""
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
    lists = {path: model.get_submodule(path) for path in declaration.stacks} or dict(_block_lists(model))
    lists = {path: blocks for path, blocks in lists.items() if path not in declaration.side}
    check_stacks(model, declaration, lists)
    stacks = tuple(_read_stack(path, blocks, declaration) for path, blocks in lists.items())
    leader = declaration.leader or (stacks[0].path if stacks else None)
    return Anatomy(type(model).__name__, stacks, side=declaration.side, leader=leader)


def _block_lists(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The outermost containers of blocks, in order of definition."""
    marked = {*(getattr(model, "_repeated_blocks", None) or ()), *(getattr(model, "_no_split_modules", None) or ())}
    return _block_lists_in(model, marked)


def _block_lists_in(module: torch.nn.Module, marked: set[str], path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if is_container(child) and _holds_blocks(list(members(child).values()), marked):
            yield child_path, child
        else:
            yield from _block_lists_in(unwrapped(child), marked, child_path)


def _holds_blocks(children: Sequence[torch.nn.Module], marked: set[str]) -> bool:
    # A list of one is a stack only if diffusers' own metadata says so: a single attention module in a
    # list of adapters looks the same.
    enough = len(children) > 1 or any(type(child).__name__ in marked for child in children)
    blocks = enough and all(not is_container(child) and _attends(child) for child in children)
    # Whole transformers side by side are no blocks: their own stacks are.
    return blocks and not all(any(_block_lists_in(child, marked)) for child in children)


def _attends(module: torch.nn.Module) -> bool:
    return any(_is_attention(name, part) for name, part in module.named_modules())


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


def _read_stack(path: str, blocks: torch.nn.Module, declaration: BlockDeclaration) -> BlockStack:
    children = list(members(blocks).values())
    parameters = tuple(parameters_of(children[0]))
    declared = declaration.carried.get(path)
    carried = declared or _returned_parameters(children[0], parameters)
    return BlockStack(
        path=path,
        block_paths=tuple(f"{path}.{name}" for name in members(blocks)),
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
        function = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):  # No source of its own: built at run time, or in an expression.
        return ()
    returns = [node.value for node in _own_statements(function) if isinstance(node, ast.Return) and node.value]
    if not returns:
        return ()
    last = max(returns, key=lambda value: value.lineno)
    values = last.elts if isinstance(last, (ast.Tuple, ast.List)) else [last]
    names = [value.id if isinstance(value, ast.Name) and value.id in parameters else None for value in values]
    return tuple(names) if any(names) else ()


def _own_statements(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, less what is in functions and classes inside it: they return to someone else."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_statements(node)
