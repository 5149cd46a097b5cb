"""A handle takes off what was attached, once, in reverse order."""

from __future__ import annotations

import contextlib

import pytest

from samovar.hooks import Handle


def test_detaching_undoes_in_reverse_order_and_only_once() -> None:
    undone: list[str] = []
    undo = contextlib.ExitStack()
    undo.callback(undone.append, "first")
    undo.callback(undone.append, "second")
    handle = Handle(undo)
    handle.detach()
    handle.detach()
    assert undone == ["second", "first"]


def test_leaving_the_block_detaches_even_when_it_raises() -> None:
    undone: list[str] = []
    undo = contextlib.ExitStack()
    undo.callback(undone.append, "done")
    with pytest.raises(KeyError), Handle(undo):
        raise KeyError("inside")
    assert undone == ["done"]
