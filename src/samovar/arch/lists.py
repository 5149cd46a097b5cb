"""The stacks of blocks among a model's lists: recognised by how their members are built, never by their names.

A block takes a stream of tokens and returns it changed, so that the next one can take it: it normalises tokens of some
width and has linear maps out of that width and back to it. Modulations, embedders, projections, experts and
feed-forward parts do not. If nothing else is found, a list that holds most of the model is its stack.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import Module

from ..core.interop import repeated_blocks, streamed_lists
from .modules import is_list, members, named_parts, tensor_bytes, unwrapped

Blocks = dict[str, Module]
"""The blocks of a stack by their paths."""

MIN_SHARE = 0.5
"""The share of weights from which a list holds most of what it is in."""


def find_lists(model: Module) -> dict[str, Blocks]:
    """The stacks of a model by path, in order of definition."""
    hints = _Hints(set(repeated_blocks(model)), set(_declared_paths(model)), tensor_bytes([model]))
    found = dict(_lists_in(model, hints, ""))
    found |= dict(_lone_blocks(model, found))
    return {path: found[path] for path in named_parts(model) if path in found}


def blocks_of(path: str, holder: Module) -> Blocks:
    """The members of a list by their paths in the model."""
    return {f"{path}.{name}": module for name, module in members(holder).items()}


@dataclass(frozen=True)
class _Hints:
    """What a model's class declares about its blocks for other purposes (see `other_libraries`)."""

    repeated: set[str]
    paths: set[str]
    num_bytes: int
    """The size of the whole model."""


def _declared_paths(model: Module) -> Iterator[str]:
    parts = named_parts(model)
    for path, attribute in streamed_lists(model).items():
        if path in parts and is_list(parts[path]):
            yield path
        else:
            problem = f"is a {type(parts[path]).__name__}" if path in parts else "does not exist"
            warnings.warn(
                f"{type(model).__name__}.{attribute} names {path!r}, which {problem}; expected a list of "
                "blocks. It is ignored. Correct the path.",
                stacklevel=2,
            )


def _lists_in(module: Module, hints: _Hints, path: str) -> Iterator[tuple[str, Blocks]]:
    """The outermost lists of blocks within a module."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        child = unwrapped(child)
        if is_list(child) and (child_path in hints.paths or _holds_blocks(child, hints, child_path)):
            yield child_path, blocks_of(child_path, child)
        else:
            yield from _lists_in(child, hints, child_path)


def _holds_blocks(holder: Module, hints: _Hints, path: str) -> bool:
    children = list(members(holder).values())
    if any(is_list(child) for child in children):
        return False
    if not _classes(children) <= hints.repeated:
        heavy = tensor_bytes(children) > MIN_SHARE * hints.num_bytes
        if not _are_alike(children) or not _are_blocks(children, certain=not heavy):
            return False
    return not all(_is_whole_model(child, len(children), hints, path) for child in children)


def _classes(modules: Sequence[Module]) -> set[str]:
    return {type(module).__name__ for module in modules}


def _are_alike(children: Sequence[Module]) -> bool:
    """Whether at least half of the modules are of a class that occurs twice: the first and the last may differ."""
    count = Counter(map(type, children))
    return 2 * sum(number for number in count.values() if number > 1) >= len(children)


def _are_blocks(modules: Sequence[Module], *, certain: bool) -> bool:
    """Whether all modules are built like blocks; if not `certain`, whether they may be blocks."""
    if any(type(module).__module__.startswith("torch.nn.modules") and not module._modules for module in modules):
        return False
    maps = [_Maps.of(module) for module in modules]
    if not all(made.may_be_a_block and (made.are_around_norms or not certain) for made in maps):
        return False
    # The stages of a U-Net get wider from one to the next.
    widths = [made.widths for made in maps if made.widths]
    return not widths or bool(frozenset.intersection(*widths))


def _is_whole_model(module: Module, num_beside: int, hints: _Hints, path: str) -> bool:
    """Whether most of a module is in stacks inside it, as in transformers side by side. A short list inside a block
    is not such a stack."""
    inner = list(_lists_in(module, hints, path))
    blocks = [block for _, stack in inner for block in stack.values()]
    if not blocks or tensor_bytes(blocks) <= MIN_SHARE * tensor_bytes([module]):
        return False
    return _classes(blocks) <= hints.repeated or max(len(stack) for _, stack in inner) >= num_beside


def _lone_blocks(model: Module, found: Mapping[str, Blocks]) -> Iterator[tuple[str, Blocks]]:
    """Blocks in no list, beside lists of others of their class, such as the one in the middle of a U."""
    classes: dict[str, set[type]] = {}
    for path, blocks in found.items():
        classes.setdefault(path.rpartition(".")[0], set()).update(map(type, blocks.values()))
    for path, part in named_parts(model).items():
        if type(part) in classes.get(path.rpartition(".")[0], ()) and path not in found:
            yield path, {path: part}


@dataclass(frozen=True)
class _Maps:
    """The maps in a module."""

    linear: int
    """Their number."""
    spatial: int
    """The number of convolutions over more than one place."""
    normed: frozenset[int]
    """The widths that are normalised."""
    widths: frozenset[int]
    """The widths that some map takes and some map returns: the width of the tokens is among them."""
    has_unknown: bool
    """Whether there are weights of unknown widths."""

    @property
    def may_be_a_block(self) -> bool:
        """Whether tokens go out as wide as they came. With many convolutions it is a VAE, a U-Net or an embedder."""
        return 3 * self.spatial < self.linear and (bool(self.widths) or self.has_unknown)

    @property
    def are_around_norms(self) -> bool:
        return self.linear > 1 and (bool(self.widths & self.normed) or (self.has_unknown and bool(self.normed)))

    @classmethod
    def of(cls, module: Module) -> _Maps:
        inputs, outputs, normed = set[int](), set[int](), set[int]()
        linear = spatial = 0
        has_unknown = False
        for part in module.modules():
            own = list(part.parameters(recurse=False))
            extents = [sum(size > 1 for size in parameter.shape) for parameter in own]
            has_tensors = bool(own) or next(part.buffers(recurse=False), None) is not None
            if isinstance(part, torch.nn.Embedding):
                continue
            if _is_spatial(part):
                spatial += 1
            elif has_tensors and (widths := _widths(part)):
                linear += 1
                inputs.add(widths[0])
                outputs.add(widths[1])
            elif max(extents, default=0) > 1:  # An unknown kind of layer, or a table.
                linear += sum(extent in (2, 3) for extent in extents)
                spatial += sum(extent > 3 for extent in extents)
                has_unknown = True
            elif isinstance(part, (torch.nn.LayerNorm, torch.nn.RMSNorm)):  # Some have no weights.
                normed.add(part.normalized_shape[-1])
            elif own and not part._modules:
                normed.add(own[0].numel())
        return cls(linear, spatial, frozenset(normed), frozenset(inputs & outputs), has_unknown)


def _is_spatial(module: Module) -> bool:
    """Whether a module is a convolution over more than one place."""
    kernel = getattr(module, "kernel_size", None)
    return isinstance(kernel, Sequence) and any(size != 1 for size in kernel)


def _widths(module: Module) -> tuple[int, int] | None:
    """The input and output width of a linear map, or of a convolution over one place."""
    for names in (("in_features", "out_features"), ("in_channels", "out_channels")):
        width, to = (getattr(module, name, None) for name in names)
        if isinstance(width, int) and isinstance(to, int):
            return width, to
    return None
