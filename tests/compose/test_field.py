"""The example that people try first: a cache and offload together, by their names, in fifty steps."""

from __future__ import annotations

from typing import Any

import pytest

from samovar import Omni

FIELD: dict[str, Any] = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.2}, "dtype": "bfloat16"}


@pytest.mark.slow
def test_offload_takes_nothing_from_the_cache() -> None:
    """Elsewhere the cache was worth nothing with offload on: here it skips the same steps, and draws the same."""
    drawn = []
    for offload in (False, True):
        with Omni(model="emoji", enable_cpu_offload=offload, device="cpu", progress=False, **FIELD) as omni:
            (result,) = omni.generate("rocket, flat style", num_inference_steps=50, seed=7)
        (stats,) = result.cache
        assert stats.skipped > 0.2 * (stats.computed + stats.skipped)
        masks = [branch.mask for one in stats.denoisers.values() for branch in one.branches.values()]
        drawn.append((masks, result.images[0].tobytes()))
    assert drawn[0] == drawn[1]
