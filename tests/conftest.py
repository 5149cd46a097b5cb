"""Nothing in the tests reaches for the network, and one thread is enough for tiny models."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Figures that a test counted: `record_property("count", ...)` puts them below the run, in whichever process."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    found = {value for r in reports for key, value in getattr(r, "user_properties", ()) if key == "count"}
    for line in sorted(found):
        terminalreporter.write_line(line)
