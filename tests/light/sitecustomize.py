"""Hides libraries of quantisation from processes that tests start: diffusers imports all that are there, for seconds.

Python imports this first where its folder is on the path. `light.with_quantisers` shows them again.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

HIDDEN = ("torchao", "bitsandbytes", "optimum")


class _Hider:
    """Says of some packages that they are not installed."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}: hidden from processes that tests start", name=name)


if os.environ.get("HIDE_QUANTISERS_FROM_TESTS"):
    _own = importlib.util.find_spec

    def _find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in HIDDEN else _own(name, package)

    importlib.util.find_spec = _find_spec
    sys.meta_path.insert(0, _Hider())  # type: ignore[arg-type]
