"""Which functions and classes does a forward go through? Others may replace any of them while a model is loaded.

Attention kernels of other packages put themselves in the place of `torch.nn.functional.scaled_dot_product_attention`,
and acceleration libraries replace methods of classes. A replay would go on with what was recorded. So what code looks
up by name is followed from the forwards on: methods and other attributes of classes, what is in a file's namespace, and
variables that a function shares with the one that made it.
"""

from __future__ import annotations

import enum
import functools
import logging
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

_START = ("forward", "__call__", "__getattr__", "__getitem__", "__iter__", "__len__")
"""Methods that are called without being named."""
_OUTSIDE = (object, torch.nn.Module)
"""Classes that are part of torch's or Python's own machinery."""
_HIDDEN = ("builtins", "enum", "samovar.")
"""Modules of Python's and our own whose classes do not count either."""
LEAVES = frozenset(("torch", "numpy", "samovar", "builtins", *sys.stdlib_module_names))
"""Packages whose functions are not followed, nor their objects looked into: that one is used is all that counts."""
_DEEPEST = 2
"""Calls from a forward to the last function that is followed: to attention, to a backend of it, to what that calls."""
_MOST_FUNCTIONS = 64
"""Functions in a table, such as that of diffusers' attention backends."""

Namespace = Mapping[str, Any]
Named = dict[int, tuple[Namespace, dict[str, None]]]


class Reached:
    """What the code of some classes and functions looks up by name."""

    def __init__(self, classes: Iterable[type], functions: Iterable[Any] = ()) -> None:
        self._named: Named = {}
        self._names: dict[str, None] = dict.fromkeys(_START)
        self._bases: dict[int, type] = {}
        """By identity: a hooked class says that it is equal to its own."""
        self._seen: set[int] = set()
        self._open: list[types.FunctionType] = []
        self.cells: list[types.CellType] = []
        """Variables that functions share with the function that made them."""
        self._depth = 0
        for cls in classes:
            self._take_class(cls)
        for function in functions:
            self._follow_value(function, {})
        while self._open and self._depth <= _DEEPEST:
            found, self._open = self._open, []
            for one in found:
                self._follow(one)
            self._depth += 1

    @property
    def classes(self) -> list[type]:
        """All of them, bases included."""
        return list(self._bases.values())

    def lookups(self) -> tuple[list[Callable[[Any], Any]], list[Namespace], list[Any]]:
        """How all that counts is looked up, where, and what is found, one after the other."""
        found = [(namespace, [name for name in names if _counts(name, namespace[name])])
                 for namespace, names in self._named.values()]  # fmt: skip
        kept = [(namespace, names if len(names) > 1 else names * 2) for namespace, names in found if names]
        getters: list[Callable[[Any], Any]] = [itemgetter(*names) for _, names in kept]
        namespaces = [namespace for namespace, _ in kept]
        return getters, namespaces, list(chain.from_iterable(map(operator.call, getters, namespaces)))

    def _note(self, namespace: Namespace, name: str) -> Any:
        self._named.setdefault(id(namespace), (namespace, {}))[1][name] = None
        return namespace[name]

    def _take_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._bases and base not in _OUTSIDE and not base.__module__.startswith(_HIDDEN):
                self._bases[id(base)] = base
                for name in [name for name in self._names if name in vars(base)]:
                    self._take_attribute(base, name)

    def _take_attribute(self, base: type, name: str) -> None:
        # The view of a class's attributes is another object each time.
        value = self._named.setdefault(id(base), (vars(base), {}))[0][name]
        self._named[id(base)][1][name] = None
        self._take(value)
        if isinstance(value, (dict, list, tuple)):
            self._follow_value(value, {})

    def _take(self, value: Any) -> None:
        """Follow whatever a name stands for."""
        for function in _functions(value):
            if id(function.__code__) not in self._seen:
                self._seen.add(id(function.__code__))
                self._open.append(function)

    def _take_outside(self, value: Any) -> None:
        """The same for what is not an attribute of a class, unless it is torch's or Python's own."""
        for function in _functions(value):
            if not _is_leaf(function.__globals__.get("__name__")):
                self._take(function)

    def _follow(self, function: types.FunctionType) -> None:
        names = dict.fromkeys(_names_in(function.__code__))
        for name in [name for name in names if name not in self._names]:
            self._names[name] = None
            for base in [base for base in self._bases.values() if name in vars(base)]:
                self._take_attribute(base, name)
        self._look_up(function.__globals__, names)
        for cell in function.__closure__ or ():
            if cell != types.CellType():
                self.cells.append(cell)
                self._follow_value(cell.cell_contents, names)
        self._take(getattr(function, "__wrapped__", None))

    def _look_up(self, namespace: dict[str, Any], names: Mapping[str, None], depth: int = 3) -> None:
        for name in [name for name in names if name in namespace]:
            self._follow_value(self._note(namespace, name), names, depth)

    def _follow_value(self, value: Any, names: Mapping[str, None], depth: int = 3) -> None:
        if isinstance(value, types.ModuleType):
            if depth and not _is_settled(value.__name__):
                self._look_up(vars(value), names, depth - 1)
        elif isinstance(value, type):
            if not _is_leaf(value.__module__):
                self._take_class(value)
        elif isinstance(value, (dict, list, tuple)):
            if len(value) <= _MOST_FUNCTIONS:
                for part in value.values() if isinstance(value, dict) else value:
                    self._take_outside(part)
        else:
            self._take_outside(value)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """The functions that an attribute of a class or an object runs."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    if isinstance(value, (functools.partial, functools.partialmethod, functools.cached_property)):
        value = value.func
    if isinstance(value, types.FunctionType) and value.__globals__.get("__name__", "").partition(".")[0] != "samovar":
        yield value


def _counts(name: str, value: Any) -> bool:
    """Whether anybody may put something else in its place: not in that of `torch` itself, or of its dtypes."""
    if isinstance(value, type):
        return not _is_leaf(value.__module__)
    of_python = name in ("__dict__", "__name__") or isinstance(value, (types.ModuleType, logging.Logger))
    return not of_python and not isinstance(value, (torch.dtype, enum.Enum))


def _is_settled(module: str) -> bool:
    """Whether nobody replaces functions there: in Python's own modules, unlike in torch's."""
    return _is_leaf(module) and not module.startswith("torch")


def _is_leaf(module: Any) -> bool:
    return str(module).partition(".")[0] in LEAVES


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
