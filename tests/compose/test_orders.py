"""Features put on by hand and taken off, in any order: the same chain of hooks, the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from compose.matrix import difference, footprint, modules_of, num_hooks, pipeline
from pipelines import PIPELINES
from ranks import Ranks
from samovar import OffloadConfig, SequenceParallelConfig, apply_offload, attach
from samovar.cache import TeaCacheBackend
from samovar.hooks import HookRegistry
from samovar.parallel import (
    Agreement,
    enable_sequence_parallel_for_model,
    make_mesh,
)

STEPS = 4
SCHEDULE = {"schedule": "#.#."}
RING = SequenceParallelConfig(ring_degree=2)
Order = tuple[str, ...]
ORDERS: list[Order] = list(itertools.permutations(("cache", "offload", "parallel")))
SOME = list(zip(ORDERS, [*ORDERS[3:], *ORDERS[:3]], strict=True))
"""Every order of putting on and every order of taking off, once each."""


def put_on(pipe: Any, feature: str) -> Callable[[], None]:
    """One feature through its own function; how it is taken off."""
    if feature == "cache":
        backend = TeaCacheBackend(SCHEDULE, Agreement(make_mesh(RING)))
        handle = backend.enable(pipe)
        return lambda: handle.detach()
    if feature == "offload":
        return apply_offload(pipe, OffloadConfig("layerwise", device="cpu")).detach
    return enable_sequence_parallel_for_model(pipe.transformer, RING).detach


def chains(pipe: Any) -> list[Any]:
    return [HookRegistry.get_or_create(module).chain for module in modules_of(pipe)]


def try_orders(pairs: Sequence[tuple[Order, Order]]) -> list[str]:
    """What went wrong, on this rank."""
    tiny, pipe = PIPELINES["flux"], pipeline("flux")
    bare, before = tiny.run(pipe, STEPS), footprint(pipe)
    with attach(pipe, cache={"backend": "tea_cache", **SCHEDULE}):
        cached = tiny.run(pipe, STEPS)
    wrong, usual = [], None
    for on, off in pairs:
        ways = {feature: put_on(pipe, feature) for feature in on}
        usual = usual or chains(pipe)
        # Same bits with the same features on, but a sum over ranks is a sum in another order.
        wrong += [f"chain {on}"] if chains(pipe) != usual else []
        left = set(on)
        for feature in (None, *off):
            if feature is not None:
                ways[feature]()
                left.remove(feature)
            apart = difference(tiny.run(pipe, STEPS), cached if "cache" in left else bare)
            if apart > (1e-5 if "parallel" in left else 0.0):
                wrong.append(f"{on} on, {off} off: {apart:.1e} with {sorted(left)} left")
        if footprint(pipe) != before or num_hooks(pipe):
            wrong.append(f"{on} on, {off} off: traces are left")
    return wrong


def test_every_order_of_three_on_two_ranks(ranks: Ranks) -> None:
    assert ranks.call(try_orders, SOME, limit_s=600.0) == [[], []]


@pytest.mark.slow
def test_every_order_on_with_every_order_off(ranks: Ranks) -> None:
    every = list(itertools.product(ORDERS, ORDERS))
    assert len(every) == 36
    assert ranks.call(try_orders, every, limit_s=1800.0) == [[], []]
