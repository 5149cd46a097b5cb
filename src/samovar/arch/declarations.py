"""What does structure alone not explain? A few lines of data for each such model.

A declaration is keyed by the model's class name and overrides what was found. Every field is optional.
Models of other libraries whose blocks look unlike those of diffusers are declared the same way, by
`register_declaration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..errors import DeclarationError, nearest


@dataclass(frozen=True)
class BlockDeclaration:
    """What is known about the blocks of one model class."""

    stacks: tuple[str, ...] = ()
    """Paths of the ModuleLists that hold the repeated blocks, in the order in which they run."""
    carried: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """By stack: for each value that a block returns, the parameter through which the next one takes it."""
    side: tuple[str, ...] = ()
    """Paths of modules that run between the blocks of a stack and are not blocks themselves."""
    leader: str | None = None
    """The stack by whose input a step is judged; by default the first that sees what is denoised."""


DECLARATIONS: dict[str, BlockDeclaration] = {
    # The coefficients that TeaCache's users fitted for these two were measured at the main stack, not at
    # the refiners that run before it.
    "Lumina2Transformer2DModel": BlockDeclaration(leader="layers"),
    "ZImageTransformer2DModel": BlockDeclaration(leader="layers"),
}


def register_declaration(class_name: str, declaration: BlockDeclaration) -> None:
    """Declare the blocks of a model class, in place of what was declared before."""
    if not isinstance(class_name, str) or not isinstance(declaration, BlockDeclaration):
        raise DeclarationError(
            f"register_declaration takes a class name and a BlockDeclaration, not {class_name!r} and {declaration!r}."
        )
    DECLARATIONS[class_name] = declaration


def declaration_for(model: torch.nn.Module) -> BlockDeclaration:
    """What is declared for a model's class or the nearest of its bases, checked against the model."""
    name = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in DECLARATIONS), None)
    if name is None:
        return BlockDeclaration()
    declaration = DECLARATIONS[name]
    paths = dict(model.named_modules())
    for path in (*declaration.stacks, *declaration.carried, *declaration.side, declaration.leader):
        if path is not None and path not in paths:
            raise DeclarationError(
                f"The declaration for {name} names {path!r}, but {type(model).__name__} has no such module. "
                f"{nearest(path, paths)}"
            )
    return declaration
