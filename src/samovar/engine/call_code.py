"""What does the code of a pipeline do with an argument? Whether it can be None is read from there: signatures say that
it can, and pipelines fail minutes later with a message about types."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .without_argument import fails_without


class CallCode:
    """What the code of a pipeline does with the arguments of its call."""

    def __init__(
        self, call: ast.AST, methods: Mapping[str, tuple[ast.AST, Collection[str]]], inputs: Collection[str]
    ) -> None:
        self._tested = set(_compared_with_none(call))
        refusals: set[str] = set()
        for method, (tree, own) in methods.items():
            found = set(_compared_with_none(tree)) & set(own)
            if method == "check_inputs":  # It may refuse two inputs together, and say nothing of none.
                refusals = found
            else:
                self._tested |= found
        self._tested |= refusals - set(_always_used(call))
        checked = methods.get("check_inputs")
        self._failing = {name for name in inputs if fails_without(call, name)}
        if checked is not None:
            self._failing |= {name for name in inputs if name in checked[1] and fails_without(checked[0], name)}
        self.made = dict(_made_from_others(call, inputs))
        self._handled = set(_used_beyond_passing(call))
        self.lists = set(_asked_for_a_list(call))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, pipeline: type, inputs: tuple[str, ...]) -> CallCode | None:
        """That of a pipeline class with these inputs; None if there is no source."""
        try:
            call = _parsed(pipeline.__call__)
            methods = {
                name: (_parsed(function), list(inspect.signature(function).parameters))
                for name, function in inspect.getmembers(pipeline, inspect.isfunction)
                if name != "__call__" and function.__module__ == pipeline.__call__.__module__
            }
        except (OSError, TypeError, SyntaxError):
            return None
        return cls(call, methods, inputs)

    def does_without(self, name: str) -> bool:
        """Whether the code has a way for this argument to be None, or leaves it to another pipeline."""
        if name in self._failing:
            return False
        return name in self._tested or name in self.made or name not in self._handled

    def is_made_only(self, name: str) -> bool:
        """Whether the code does without this argument only if it gets another one to make it from."""
        return name in self.made and name in self._handled and name not in self._tested


def _parsed(function: Any) -> ast.AST:
    """The definition of a function. A method stays inside of a statement: it cannot be shifted to the margin if a text
    in it begins there."""
    source = inspect.getsource(inspect.unwrap(function))
    (found,) = ast.parse(f"if True:\n{source}" if source[0].isspace() else source).body
    return found.body[0] if isinstance(found, ast.If) else found


def _compared_with_none(tree: ast.AST) -> Iterator[str]:
    """The names that are compared with None, or asked for their truth."""
    for node in ast.walk(tree):
        tests: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(sign, (ast.Is, ast.IsNot)) for sign in node.ops):
            tests = [node.left]
        elif isinstance(node, (ast.If, ast.IfExp)):
            tests = [node.test]
        elif isinstance(node, ast.BoolOp):
            tests = node.values
        elif isinstance(node, ast.UnaryOp):
            tests = [node.operand]
        yield from (test.id for test in tests if isinstance(test, ast.Name))


def _made_from_others(tree: ast.AST, inputs: Collection[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Inputs that are made from others, such as a video from an image, and these."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            used = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            names = {each.id for each in node.targets if isinstance(each, ast.Name)}
            others = tuple(sorted(used & set(inputs)))
            yield from ((name, others) for name in sorted(names - used) if others)


def _used_beyond_passing(tree: ast.AST) -> Iterator[str]:
    """Names that are used otherwise than as an argument of the same name."""
    passed = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Name) and node.arg == node.value.id
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in passed:
            yield node.id


def _always_used(tree: ast.AST) -> Iterator[str]:
    """Names that are used whatever else is given, unless latents are."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If):
            if "latents" in ast.dump(node.test):
                yield from (name for statement in node.body for name in _always_used(statement))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "check_inputs":
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif not isinstance(node, ast.IfExp):
            yield from _always_used(node)


def _asked_for_a_list(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            value, kinds = node.args
            if isinstance(value, ast.Name) and any(isinstance(n, ast.Name) and n.id == "list" for n in ast.walk(kinds)):
                yield value.id
