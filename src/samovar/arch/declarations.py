"""Declares what structure alone does not explain, in a few lines of data for each such model.

A declaration is keyed by the model's class name and overrides what was found. Every field is optional. A class of
diffusers is declared in `DECLARATIONS`, which ships with Samovar; none needs it today. Declare your own class, or one
of another library, with `register_declaration` from the code that defines or imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.nn import Module

from ..core.errors import DeclarationError, nearest
from .modules import is_list, named_parts, parameters_of


@dataclass(frozen=True)
class BlockDeclaration:
    """The blocks of one model class."""

    stacks: tuple[str, ...] = ()
    """Paths of the ModuleLists that hold the repeated blocks, in the order in which they run."""
    carried: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """By stack: for each value that a block returns, the parameter through which the next one takes it."""
    side: tuple[str, ...] = ()
    """Paths of modules that run between the blocks of a stack and are not blocks themselves."""
    leader: str | None = None
    """The stack by whose input a step is judged; by default the first whose tokens change from step to step."""


DECLARATIONS: dict[str, BlockDeclaration] = {}

Stacks = Mapping[str, Mapping[str, Module]]
"""By the path of a stack: its blocks by their paths."""


def register_declaration(class_name: str, declaration: BlockDeclaration) -> None:
    """Declare the blocks of a model class, in place of any earlier declaration."""
    if not isinstance(class_name, str) or not isinstance(declaration, BlockDeclaration):
        raise DeclarationError(
            f"register_declaration takes a class name and a BlockDeclaration, not {class_name!r} and {declaration!r}."
        )
    for name, value in (("stacks", declaration.stacks), ("side", declaration.side), *declaration.carried.items()):
        if isinstance(value, str):
            raise DeclarationError(
                f"The declaration for {class_name} has {name}={value!r}, a string; expected a tuple: ({value!r},)."
            )
    DECLARATIONS[class_name] = declaration


def declaration_for(model: Module) -> BlockDeclaration:
    """The declaration for a model's class or the nearest of its bases; its paths are checked against the model."""
    name = _declared_name(model)
    if name is None:
        return BlockDeclaration()
    declaration, parts = DECLARATIONS[name], named_parts(model)
    for path in (*declaration.stacks, *declaration.carried, *declaration.side, declaration.leader):
        if path is not None and path not in parts:
            raise _misfit(model, f"names {path!r}, but {type(model).__name__} has no such module", path, parts)
    lists = [path for path, part in parts.items() if is_list(part)]
    for path in declaration.stacks:
        if declaration.stacks.count(path) > 1:
            raise DeclarationError(f"The declaration for {name} names the stack {path!r} twice. Name it once.")
        if path not in lists:
            what = f"is a {type(parts[path]).__name__}" if len(parts[path]._modules) else "is empty"
            raise _misfit(model, f"names {path!r} as a stack, but it {what}; expected a list of modules", path, lists)
    return declaration


def check_stacks(model: Module, declaration: BlockDeclaration, stacks: Stacks) -> None:
    """Refuse a declaration that names a stack that the model lacks, or a parameter that its blocks do not take."""
    for path in (*declaration.carried, declaration.leader):
        if path is not None and path not in stacks:
            use = "its leader" if path == declaration.leader else "a key of carried"
            raise _misfit(model, f"has {path!r} as {use}, which is not a stack of blocks", path, stacks)
    for path, carried in declaration.carried.items():
        block = next(iter(stacks[path].values()))
        parameters = parameters_of(block)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for name in carried:
            if name is not None and name not in parameters and not takes_any:
                problem = f"carries {name!r} through {path!r}, but {type(block).__name__} takes no such parameter"
                raise _misfit(model, problem, name, parameters)


def _declared_name(model: Module) -> str | None:
    return next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in DECLARATIONS), None)


def _misfit(model: Module, problem: str, given: str, known: Iterable[str]) -> DeclarationError:
    return DeclarationError(f"The declaration for {_declared_name(model)} {problem}. {nearest(given, known)}")
