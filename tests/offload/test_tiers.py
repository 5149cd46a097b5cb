"""The second budget: what is sent most often is pinned first, what no file holds must fit, and the figures add up."""

from __future__ import annotations

import itertools
import random

import pytest

from samovar.core.errors import SettingError
from samovar.offload import OffloadConfig, WeightUse, plan_offload, plan_tiers, read_sizes, uses_of
from samovar.offload.tiers import NUM_BUFFERS, Crossing

GIB = 2**30


def groups(count: int, crossing: Crossing = "forward", *, size: int = GIB, anonymous: int = 0) -> list[WeightUse]:
    return [WeightUse((crossing, str(index)), size, crossing, anonymous) for index in range(count)]


def test_without_a_budget_everything_is_pinned() -> None:
    plan = plan_tiers([*groups(3), *groups(2, "run", anonymous=GIB)], None)
    assert set(plan.tiers.values()) == {"pinned"}
    assert (plan.held_bytes, plan.buffer_bytes) == (5 * GIB, 0)


def test_without_a_budget_nothing_is_refused_and_most_of_the_host_is_used() -> None:
    plan = plan_tiers([*groups(6), *groups(6, "run", anonymous=GIB)], None, host_bytes=10 * GIB)
    assert [plan.bytes_in("pinned", "forward"), plan.bytes_in("pinned", "run")] == [2 * GIB, 6 * GIB]
    assert plan.bytes_in("disk") == 4 * GIB
    plan = plan_tiers(groups(12, anonymous=GIB), None, host_bytes=10 * GIB)
    assert [plan.bytes_in("pinned"), plan.bytes_in("pageable")] == [8 * GIB, 4 * GIB], "what is in memory stays there"


def test_what_is_sent_most_often_is_pinned_first() -> None:
    plan = plan_tiers([*groups(4, "run"), *groups(4, "once"), *groups(4)], 6 * GIB)
    assert plan.bytes_in("pinned", "forward") == 4 * GIB
    assert plan.bytes_in("pinned", "run") == GIB, "the buffers take a part of the sixth"
    assert plan.bytes_in("disk", "once") == 4 * GIB
    assert plan.held_bytes == 5 * GIB + NUM_BUFFERS * plan.buffer_bytes <= 6 * GIB


@pytest.mark.parametrize(("host_memory", "may_pin"), [(None, True), (4 * GIB, True), (3 * GIB, False), (GIB, False)])
def test_what_is_sent_ahead_is_not_pinned_but_may_be_where_all_has_room(host_memory: int | None, may_pin: bool) -> None:
    (ahead,) = groups(1, "ahead")
    plan = plan_tiers([*groups(2), ahead], host_memory)
    assert plan.tier(ahead.key) == "disk"
    assert plan.may_pin_all is may_pin
    (in_memory,) = groups(1, "ahead", anonymous=GIB)
    assert plan_tiers([in_memory], 2 * GIB).may_pin_all, "where it is costs nothing more"


def test_what_is_read_from_disk_is_spread_evenly() -> None:
    """Reading pauses while its buffers are full, so it must not all be at one end of the model."""
    plan = plan_tiers(groups(60), 30 * GIB)
    runs = [len([*run]) for _, run in itertools.groupby(plan.tier(("forward", str(index))) for index in range(60))]
    assert max(runs) <= 2


def test_what_no_file_holds_must_fit() -> None:
    some = [*groups(2, anonymous=GIB), *groups(4, "run")]
    with pytest.raises(SettingError, match=r"=1.00 GiB is not enough: at least 2.19 GiB.*dtype of its files") as e:
        plan_tiers(some, GIB)
    assert e.value.param == "host_memory"
    held = plan_tiers(some, 3 * GIB)
    assert [held.tier(("forward", "0")), held.tier(("run", "0"))] == ["pinned", "disk"]


def test_a_budget_below_its_buffers_is_refused() -> None:
    with pytest.raises(SettingError, match=r"at least 12.00 KiB is needed, 0 B for weights.*12.00 KiB for buffers"):
        plan_tiers(groups(2), 1000)


def test_any_mixture_stays_within_the_budget() -> None:
    rng = random.Random(0)
    for _ in range(300):
        some = []
        for index in range(rng.randint(1, 12)):
            size = rng.randint(1, 2**20)
            anonymous = rng.choice([0, size, rng.randint(0, size)])
            some.append(WeightUse(("a", str(index)), size, rng.choice(["forward", "run", "once"]), anonymous))
        budget = rng.randint(2**14, 2**23)
        try:
            plan = plan_tiers(some, budget, host_bytes=rng.choice([None, 2**22]))
        except SettingError:
            assert sum(group.anonymous_bytes for group in some) > budget - 3 * 2**19
            continue
        assert plan.held_bytes <= budget
        assert plan.tiers.keys() == {group.key for group in some}
        assert sum(part.num_bytes for part in plan.parts) == sum(group.num_bytes for group in some)


def test_a_model_of_38_gib_within_16_says_what_the_disk_allows() -> None:
    sizes = read_sizes("QwenImageTransformer2DModel")
    plan = plan_offload(sizes, OffloadConfig(gpu_memory="12GiB", device="cpu"))
    tiers = plan_tiers(uses_of(sizes, plan), 16 * GIB)
    assert tiers.held_bytes <= 16 * GIB
    read = tiers.bytes_in("disk", "forward")
    streamed = [block.num_bytes for block in sizes[0].blocks if block.path in plan.component("transformer").streamed]
    assert read + tiers.bytes_in("pinned", "forward") == sum(streamed)
    assert f"are read from disk in every forward: about {read / 2e9:.3g} s at 2.0 GB/s (assumed)" in str(tiers)
    assert tiers.to_dict()["read_seconds_per_forward"] == pytest.approx(read / 2e9)


def test_what_crosses_compressed_takes_less_pinned_memory_beside_the_weights_themselves() -> None:
    in_files = [WeightUse(("a", str(index)), GIB, "forward", 0, GIB * 3 // 4) for index in range(8)]
    plan = plan_tiers(in_files, 6 * GIB)
    assert (plan.bytes_in("pinned"), plan.held_bytes) == (8 * GIB, 6 * GIB)
    assert "8.00 GiB pinned as 6.00 GiB, compressed, sent in every forward" in str(plan)
    in_memory = [use._replace(anonymous_bytes=GIB) for use in in_files]
    with pytest.raises(SettingError, match=r"at least 8.19 GiB"):
        plan_tiers(in_memory, 8 * GIB)
    plan = plan_tiers(in_memory, 10 * GIB)
    assert (plan.bytes_in("pinned"), len(plan.plain)) == (8 * GIB, 6), "there is room for two compressed copies"
    assert plan.held_bytes <= 10 * GIB
