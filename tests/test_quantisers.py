"""Packages that quantise weights: which, and from which version on."""

from __future__ import annotations

import tomllib
from pathlib import Path

from samovar import quantisers
from samovar.arch.quantised import KINDS


def test_what_quantises_is_what_the_extra_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["quantised"]
    assert sorted(extra) == sorted(quantiser.requirement for quantiser in quantisers.QUANTISERS.values())
    assert {kind.package for kind in KINDS.values()} <= set(quantisers.QUANTISERS)
