"""Does a pipeline fail if an argument is None? Its code is followed as if it were, as far as that decides the way.

Nobody gives latents or embeddings, as far as this goes: who does gives the argument in another form. What else a
condition asks for is unknown, and both ways must fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from enum import Enum, auto


class _End(Enum):
    """How the statements end, for this argument."""

    FAILED = auto()
    OVER = auto()
    """It has another value now, or the function has returned."""
    OPEN = auto()


def fails_without(function: ast.AST, name: str) -> bool:
    """Whether a function refuses None as an argument, or uses it as if it were something."""
    return isinstance(function, ast.FunctionDef) and _Follow(name).statements(function.body) is _End.FAILED


class _Follow:
    """Follows statements with one name as None."""

    def __init__(self, name: str) -> None:
        self._name = name

    def statements(self, body: Iterable[ast.stmt]) -> _End:
        for statement in body:
            end = self._statement(statement)
            if end is not _End.OPEN:
                return end
        return _End.OPEN

    def _statement(self, node: ast.stmt) -> _End:
        if isinstance(node, ast.If):
            return self._choice(node)
        if isinstance(node, ast.Raise):
            return _End.FAILED
        if isinstance(node, ast.With):
            return self.statements(node.body)
        if isinstance(node, (ast.For, ast.While, ast.Try, ast.FunctionDef)):  # May not run at all.
            return _End.OVER if self._is_set(node) else _End.OPEN
        if self._breaks(node):
            return _End.FAILED
        return _End.OVER if isinstance(node, ast.Return) or self._is_set(node) else _End.OPEN

    def _choice(self, node: ast.If) -> _End:
        if self._breaks(node.test):
            return _End.FAILED
        truth = self._truth(node.test)
        if truth is not None:
            return self.statements(node.body if truth else node.orelse)
        ends = {self.statements(node.body), self.statements(node.orelse)}
        if len(ends) == 1:
            return ends.pop()
        return _End.OVER if _End.OVER in ends else _End.OPEN

    def _is_set(self, tree: ast.AST) -> bool:
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        return any(node.id == self._name for node in names)

    def _is_it(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._name

    def _truth(self, test: ast.expr) -> bool | None:
        """What a condition is; None if that is unknown."""
        if self._is_it(test):
            return False
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self._truth(test.operand)
            return None if truth is None else not truth
        if isinstance(test, ast.BoolOp):
            wanted = isinstance(test.op, ast.Or)  # One such value decides.
            truths = [self._truth(value) for value in test.values]
            return wanted if wanted in truths else None if None in truths else not wanted
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "isinstance":
            return False if self._is_it(test.args[0]) else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Name):
            is_none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
            if is_none and isinstance(test.ops[0], (ast.Is, ast.IsNot)) and self._is_missing(test.left.id):
                return isinstance(test.ops[0], ast.Is)
        return None

    def _is_missing(self, name: str) -> bool:
        return name == self._name or "latents" in name or "embed" in name

    def _breaks(self, node: ast.AST) -> bool:
        """Whether evaluating something takes an attribute or an item of None, its length, or gives it to a processor of
        images or videos."""
        if isinstance(node, (ast.Attribute, ast.Subscript)) and self._is_it(node.value):
            return True
        if isinstance(node, ast.Call) and any(map(self._is_it, node.args[:1])) and _takes_no_none(node.func):
            return True
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                if self._breaks(value):
                    return True
                if self._truth(value) is not isinstance(node.op, ast.And):  # It may end here.
                    return False
            return False
        if isinstance(node, ast.IfExp):
            truth = self._truth(node.test)
            ways = [node.body] * (truth is not False) + [node.orelse] * (truth is not True)
            return self._breaks(node.test) or all(map(self._breaks, ways))
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)):
            return False
        return any(map(self._breaks, ast.iter_child_nodes(node)))


def _takes_no_none(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "len"
    return isinstance(function, ast.Attribute) and function.attr in ("preprocess", "preprocess_video")
