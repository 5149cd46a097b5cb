"""Packages that quantise weights: which, and from which version on."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import torch

from samovar.arch.quantised import KINDS
from samovar.core import quantisers
from samovar.core.errors import SettingError
from samovar.engine.quantize import check_kind


def test_what_quantises_is_what_the_extra_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["quantised"]
    assert sorted(extra) == sorted(quantiser.requirement for quantiser in quantisers.QUANTISERS.values())
    assert {kind.package for kind in KINDS.values()} <= set(quantisers.QUANTISERS)


def test_a_package_that_is_too_old_or_not_here_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_itself = quantisers.Quantiser("torch", "torch>=2")
    assert torch_itself.problem() == ""
    old = torch_itself._replace(requirement="torch>=99")
    assert old.problem() == f"of which {importlib.metadata.version('torch')} is installed, and >=99 is needed"
    assert torch_itself._replace(requirement="no-such-package>=1").problem() == "which is not installed"
    monkeypatch.setitem(quantisers.QUANTISERS, "torchao", old)
    with pytest.raises(
        SettingError, match=r"quantization='int8' needs torch, of which .* is installed, and >=99 is needed"
    ):
        check_kind("int8", torch.device("cpu"))
