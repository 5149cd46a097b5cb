"""Importing Samovar: what it exports, how little it loads, and that it opens no socket."""

from __future__ import annotations

import subprocess
import sys

import pytest

import samovar


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_exported_names_are_there() -> None:
    assert len(set(samovar.__all__)) == len(samovar.__all__)
    for name in samovar.__all__:
        assert getattr(getattr(samovar, name), "__name__", name) == name
    assert set(samovar.__all__) <= set(dir(samovar))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = samovar.nothing


def test_importing_is_lighter_than_importing_diffusers() -> None:
    """No timing, which would be noise: Samovar's imports are a part of what diffusers imports."""
    loaded = "import sys; print(*sorted(sys.modules))"
    assert not {"torch", "diffusers", "transformers"} & set(run(f"import samovar; {loaded}").split())
    ours = set(run(f"import samovar, samovar.hooks, samovar.arch; {loaded}").split())
    theirs = set(run(f"import diffusers; {loaded}").split())
    own = {name for name in ours if name == "samovar" or name.startswith("samovar.")}
    assert len(ours - own - theirs) <= 3, sorted(ours - own - theirs)
    assert "diffusers" not in ours


def test_importing_opens_no_socket() -> None:
    watch = (
        "import sys; opened = [];"
        "sys.addaudithook(lambda event, args: opened.append(event) if event.startswith('socket.') else None);"
        "import samovar, samovar.hooks, samovar.arch, samovar.cli; print(opened)"
    )
    assert run(watch) == "[]"
