"""What does structure alone not explain? A few lines of data for each such model.

A declaration is keyed by the model's class name and overrides what was found. Every field is optional.
Models of other libraries whose blocks look unlike those of diffusers are declared the same way, by
`register_declaration`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..errors import DeclarationError, nearest
from .modules import members, named_parts, parameters_of


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


DECLARATIONS: dict[str, BlockDeclaration] = {}
"""None of diffusers' models needs one."""

Stacks = Mapping[str, Mapping[str, torch.nn.Module]]
"""By the path of a stack: its blocks by their paths."""
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
"""What may be declared as a stack."""


def register_declaration(class_name: str, declaration: BlockDeclaration) -> None:
    """Declare the blocks of a model class, in place of what was declared before."""
    if not isinstance(class_name, str) or not isinstance(declaration, BlockDeclaration):
        raise DeclarationError(
            f"register_declaration takes a class name and a BlockDeclaration, not {class_name!r} and {declaration!r}."
        )
    for name, value in (("stacks", declaration.stacks), ("side", declaration.side), *declaration.carried.items()):
        if isinstance(value, str):
            raise DeclarationError(
                f"The declaration for {class_name} has {name}={value!r}, a string; a tuple was expected: ({value!r},)."
            )
    DECLARATIONS[class_name] = declaration


def declaration_for(model: torch.nn.Module) -> BlockDeclaration:
    """What is declared for a model's class or the nearest of its bases, its paths checked against the model."""
    name = _declared_name(model)
    if name is None:
        return BlockDeclaration()
    declaration = DECLARATIONS[name]
    parts = named_parts(model)
    for path in (*declaration.stacks, *declaration.carried, *declaration.side, declaration.leader):
        if path is not None and path not in parts:
            raise DeclarationError(
                f"The declaration for {name} names {path!r}, but {type(model).__name__} has no such module. "
                f"{nearest(path, parts)}"
            )
    lists = {path for path, part in parts.items() if isinstance(part, _LISTS) and members(part)}
    for path in declaration.stacks:
        if declaration.stacks.count(path) > 1:
            raise DeclarationError(f"The declaration for {name} names the stack {path!r} twice. Name it once.")
        if path not in lists:
            what = "is empty" if isinstance(parts[path], _LISTS) else f"is a {type(parts[path]).__name__}"
            raise DeclarationError(
                f"The declaration for {name} names {path!r} as a stack, but it {what}; a list of modules was expected. "
                f"{nearest(path, lists)}"
            )
    return declaration


def check_stacks(model: torch.nn.Module, declaration: BlockDeclaration, stacks: Stacks) -> None:
    """Refuse a declaration that speaks of what is no stack of the model, or of what its blocks do not take."""
    for path in (*declaration.carried, declaration.leader):
        if path is not None and path not in stacks:
            raise DeclarationError(
                f"The declaration for {_declared_name(model)} has {path!r} as "
                f"{'its leader' if path == declaration.leader else 'a key of carried'}, which is no stack of blocks. "
                f"{nearest(path, stacks)}"
            )
    for path, carried in declaration.carried.items():
        block = next(iter(stacks[path].values()))
        parameters = parameters_of(block)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in carried:
            if name is not None and name not in parameters and not takes_any:
                raise DeclarationError(
                    f"The declaration for {_declared_name(model)} carries {name!r} through {path!r}, but "
                    f"{type(block).__name__} takes no such parameter. {nearest(name, parameters)}"
                )


def _declared_name(model: torch.nn.Module) -> str | None:
    return next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in DECLARATIONS), None)
