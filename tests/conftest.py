"""Nothing in the tests reaches for the network, and one thread is enough for tiny models.

oneDNN may not use the matrix tiles (AMX) of the processor. Some virtual machines announce them but leave out the page
of CPUID that says how large they are; oneDNN then sets up tiles of no size, and the first product in bfloat16 is an
illegal instruction that ends the process. Nothing that is tested here depends on them.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Figures that a test counted: `record_property("count", ...)` puts them below the run, in whichever process."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    found = {value for r in reports for key, value in getattr(r, "user_properties", ()) if key == "count"}
    for line in sorted(found):
        terminalreporter.write_line(line)
