"""Nothing in the tests reaches for the network, and one thread is enough for tiny models.

oneDNN may not use the matrix tiles (AMX) of the processor. Some virtual machines announce them but leave out the page
of CPUID that says how large they are; oneDNN then sets up tiles of no size, and the first product in bfloat16 is an
illegal instruction that ends the process. Nothing that is tested here depends on them.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch

import light

torch.set_num_threads(1)

LOCK = Path(__file__).parents[1] / "requirements.lock"


@pytest.fixture(scope="session", autouse=True)
def _quantisers_hidden() -> None:
    """From what tests start, not from the workers of xdist: they run tests themselves, and are started before any."""
    light.hide_quantisers()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Tests of what an older diffusers than the locked one lacks are skipped (benchmarks/versions.py)."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        if lacking := _lacking(error):
            pytest.skip(lacking)
        raise


def _lacking(error: Exception) -> str:
    import diffusers
    from packaging.version import Version

    (locked,) = re.findall(r"^diffusers==(.*)", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if Version(diffusers.__version__) >= Version(locked):
        return ""
    if re.search(r"diffusers.*has no attribute|cannot import name .* from 'diffusers", str(error)):
        return f"diffusers {diffusers.__version__}: {error}"
    if "group_offloading" in traceback.extract_tb(error.__traceback__)[-1].filename:
        return "before 0.41, diffusers' group offload needed an accelerator"
    return ""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Figures that a test counted: `record_property("count", ...)` puts them below the run, in whichever process."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    found = {value for r in reports for key, value in getattr(r, "user_properties", ()) if key == "count"}
    for line in sorted(found):
        terminalreporter.write_line(line)
