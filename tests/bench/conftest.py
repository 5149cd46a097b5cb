"""The fixtures of the lab's tests."""

from __future__ import annotations

from lab.conftest import make_runner, make_session, pipeline

__all__ = ["make_runner", "make_session", "pipeline"]
