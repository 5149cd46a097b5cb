"""Imports a checkout without a trace. Repositories share names such as `models` or `utils`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from .standins import Finder, is_stand_in


class World:
    """One checkout, with the modules that were imported from it. They are there inside `inside()`, and nowhere else."""

    def __init__(self, checkout: Path, paths: tuple[str, ...], needs: tuple[str, ...]) -> None:
        self._checkout = checkout
        self._paths = [str(checkout / path) for path in paths]
        self._modules: dict[str, ModuleType] = {}
        self._finder = Finder(needs)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """With the checkout first on the path, and stand-ins for packages that are not installed."""
        before = sys.path[:], sys.dont_write_bytecode
        names = {entry.stem for path in self._paths for entry in Path(path).glob("*")}
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
        sys.path[:0] = self._paths
        sys.dont_write_bytecode = True  # A checkout stays as it is.
        sys.meta_path.append(self._finder)
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            sys.meta_path.remove(self._finder)
            sys.path[:], sys.dont_write_bytecode = before
            ours = [name for name, module in list(sys.modules.items()) if self._is_ours(module)]
            for name in ours:
                self._modules[name] = sys.modules.pop(name)
            sys.modules.update(hidden)

    def _is_ours(self, module: ModuleType) -> bool:
        if is_stand_in(module):
            return True
        found = getattr(module, "__dict__", {})  # Not asked by getattr: torch.ops has whatever it is asked for.
        path = found.get("__path__", ())
        path = getattr(path, "_path", path)  # That of a package without a file would ask for its parent.
        places = [found.get("__file__") or "", *map(str, path or ())]
        return any(Path(place).is_relative_to(self._checkout) for place in places if place)


def pass_by(package: str) -> None:
    """Let modules of a package be imported without what its `__init__` imports."""
    if package not in sys.modules:
        module = sys.modules[package] = ModuleType(package)
        folders = [Path(path) / package.replace(".", "/") for path in sys.path]
        module.__path__ = [str(folder) for folder in folders if folder.is_dir()][:1]


@cache
def _ask_before() -> None:
    """Let diffusers and transformers find out what is installed while no stand-in is there; they ask once."""
    importlib.import_module("diffusers.models.attention_dispatch")
    importlib.import_module("diffusers.models.attention_processor")
    import transformers.utils.import_utils as installed

    for name, function in vars(installed).items():
        if name.startswith("is_") and name.endswith("_available"):
            with contextlib.suppress(Exception):
                function()


@cache
def world(checkout: Path, paths: tuple[str, ...], needs: tuple[str, ...] = ()) -> World:
    """The one world of a checkout: its modules are imported once."""
    _ask_before()
    return World(checkout, paths, needs)
