"""What does a block return? Its source is read, never run; a block without source says nothing."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def returned_parameters(block: torch.nn.Module, parameters: Sequence[str]) -> tuple[str | None, ...]:
    """The parameters that the last return statement of a block's forward names; None for each other value."""
    function = _parse(inspect.unwrap(type(block).forward))
    returns = _returned(function) if function is not None else []
    if not returns:
        return ()
    values = _elements(max(returns, key=lambda value: value.lineno))
    names = [value.id if isinstance(value, ast.Name) and value.id in parameters else None for value in values]
    return tuple(names) if any(names) else ()


@functools.lru_cache(maxsize=512)
def adds_to_its_input(cls: Any) -> bool:
    """Whether a module returns one of its arguments with something added to it, as residual blocks do.

    All methods of the class are read: some forwards only call another method, for checkpointing for example.
    """
    bases = [base for base in cls.__mro__ if not base.__module__.startswith("torch.nn.modules.module")]
    methods = {name: value for base in reversed(bases) for name, value in vars(base).items() if callable(value)}
    functions = (_parse(inspect.unwrap(method)) for method in methods.values() if not isinstance(method, type))
    return any(_is_residual(function) for function in functions if function is not None)


def _is_residual(function: _Function) -> bool:
    arguments = function.args
    streams = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    streams.discard("self")
    returned = [value for values in map(_elements, _returned(function)) for value in values]
    names = {value.id for value in returned if isinstance(value, ast.Name)}
    # In the order of the source, so that another name for an argument (`residual = x`) is known when it is added.
    for node in _own_nodes(function):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
            if node.target.id in names & streams:
                return True
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            for target, value in zip(_elements(node.targets[0]), _elements(node.value), strict=False):
                if isinstance(target, ast.Name) and isinstance(value, ast.Name) and value.id in streams:
                    streams.add(target.id)
                elif isinstance(target, ast.Name) and _is_sum_with(value, streams):
                    if target.id in names:
                        return True
                    streams.add(target.id)
    return any(_is_sum_with(value, streams) for value in returned)


def _is_sum_with(value: ast.expr, names: set[str]) -> bool:
    """Whether a value is a sum of which a name is one term."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        sides = (value.left, value.right)
        return any((isinstance(s, ast.Name) and s.id in names) or _is_sum_with(s, names) for s in sides)
    return False


def _parse(function: object) -> _Function | None:
    """A function as a tree; None if it has no source: it was built at run time, or stands in an expression."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _returned(function: _Function) -> list[ast.expr]:
    return [node.value for node in _own_nodes(function) if isinstance(node, ast.Return) and node.value]


def _elements(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and classes inside it, which return to others."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(node)
