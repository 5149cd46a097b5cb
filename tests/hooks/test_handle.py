"""A handle takes off what was attached, once, in reverse order."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from samovar.hooks import Handle
from samovar.hooks.handle import for_now


def test_detaching_undoes_in_reverse_order_and_only_once() -> None:
    undone: list[str] = []
    undo = contextlib.ExitStack()
    undo.callback(undone.append, "first")
    undo.callback(undone.append, "second")
    handle = Handle(undo)
    handle.detach()
    handle.detach()
    assert undone == ["second", "first"]


def test_attributes_that_are_changed_for_now_come_back_even_when_the_block_raises() -> None:
    owner = SimpleNamespace(name="own", size=1)
    with for_now(owner, name="other"):
        with pytest.raises(KeyError, match="inner 2"), for_now(owner, name="inner", size=2):
            raise KeyError(f"{owner.name} {owner.size}")
        assert (owner.name, owner.size) == ("other", 1)
    assert (owner.name, owner.size) == ("own", 1)
    with pytest.raises(AttributeError, match="colour"), for_now(owner, size=3, colour="red"):
        pass
    assert vars(owner) == {"name": "own", "size": 1}
