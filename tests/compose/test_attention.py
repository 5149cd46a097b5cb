"""Another attention is used where it agrees with the default, and the default stays where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compose.matrix import difference, footprint, num_hooks
from pipelines import PIPELINES
from ranks import Ranks
from samovar import attach
from samovar.core.errors import SettingError
from samovar.parallel import attention
from simulated import SimulatedRecorder, recording_by


def backends(pipe: Any) -> set[Any]:
    found = (getattr(module, "processor", None) for module in pipe.transformer.modules())
    return {one._attention_backend for one in found if hasattr(one, "_attention_backend")}


@pytest.mark.parametrize("settings", [{}, {"compile": "graphs"}, {"cache": {"backend": "auto", "tolerance": 1e6}}])
def test_it_is_used_where_it_agrees(settings: dict[str, Any]) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    active, bare = registry._active_backend, tiny.run(pipe, 6)
    before = footprint(pipe)
    with attach(pipe, **{k: v for k, v in settings.items() if k == "cache"}):
        expected = tiny.run(pipe, 6)
    simulated = recording_by(SimulatedRecorder(), torch.device("cpu"))
    with simulated, attach(pipe, attention="math", **settings) as attached:
        found = [tiny.run(pipe, 6) for _ in range(2)]
        assert {str(getattr(one, "value", one)) for one in backends(pipe)} == {"_native_math"}
        assert "math" in str(attached.explain())
        assert "used; the output differs from the default's by" in str(attached.explain())
        assert all(one.replayed > 6 for one in attached.stats().graphs.values())
    assert torch.equal(*found)
    assert 0 < difference(found[0], expected) < 1e-4
    assert registry._active_backend is active, "other models keep theirs"
    assert footprint(pipe) == before
    assert num_hooks(pipe) == 0
    assert torch.equal(tiny.run(pipe, 6), bare)


@pytest.mark.parametrize("how", ["wrong", "failing"])
def test_the_default_stays_where_it_does_not_agree(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry

    def other(query: torch.Tensor, **others: Any) -> torch.Tensor:
        if how == "failing":
            raise RuntimeError("no kernel for this GPU\nand more")
        return torch.zeros_like(query)

    monkeypatch.setitem(registry._backends, AttentionBackendName._NATIVE_MATH, other)
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    expected = tiny.run(pipe, 4)
    with attach(pipe, attention="math") as attached:
        assert torch.equal(tiny.run(pipe, 4), expected)
        assert backends(pipe) == {None}
        text = str(attached.explain())
        reason = (
            "failed (RuntimeError: no kernel for this GPU)" if how == "failing" else "differs from the default's by"
        )
        assert "not used:" in text
        assert reason in text
    assert num_hooks(pipe) == 0


def test_names_are_checked() -> None:
    pipe = PIPELINES["flux"].build(0)
    with pytest.raises(SettingError, match=r"attention='flsh' is not a backend. Did you mean 'flash'"):
        attach(pipe, attention="flsh")
    with pytest.raises(SettingError, match=r"'flash' cannot be used here: .*install `flash-attn"):
        attach(pipe, attention="flash")
    for backend, ranks in (("flash", {"ulysses_degree": 2}), ("math", {"ring_degree": 2})):
        with pytest.raises(SettingError, match="cannot be used by 2 ranks that share a sequence"):
            attach(pipe, attention=backend, parallel=ranks)
    with pytest.raises(SettingError, match="is no model of diffusers"):
        attach(torch.nn.ModuleDict({"transformer": torch.nn.Linear(2, 2)}), attention="math")
    assert num_hooks(pipe) == 0
    assert backends(pipe) == {None}


RANKS = {"Ulysses 2": {"ulysses_degree": 2}, "gathered 2": {"allgather_degree": 2}, "CFG 2": {"cfg_parallel_size": 2}}
CACHE = {"backend": "tea_cache", "schedule": "##.#"}


def _on_a_rank(cases: list[str]) -> list[tuple[torch.Tensor, str, set[str], set[Any]]]:
    """Run by each rank: the picture, what was said, which kernels its own attentions may use, and what is left."""
    found = []
    plain = attention.sdpa
    for name in cases:
        tiny = PIPELINES["qwen-image" if name == "CFG 2" else "flux"]
        pipe = tiny.build(0)
        allowed: set[str] = set()

        def noting(*args: Any, allowed: set[str] = allowed, **kwargs: Any) -> torch.Tensor:
            allowed.add("all" if torch.backends.cuda.flash_sdp_enabled() else "math")
            return plain(*args, **kwargs)

        attention.sdpa = noting
        try:
            with attach(pipe, attention="math", cache=CACHE, parallel=RANKS[name]) as attached:
                tiny.run(pipe, 4)
                picture, told = tiny.run(pipe, 4), str(attached.explain())
        finally:
            attention.sdpa = plain
        found.append((picture, told, allowed, backends(pipe)))
    return found


def test_on_two_ranks(ranks: Ranks) -> None:
    expected = {}
    for name in ("flux", "qwen-image"):
        with attach(PIPELINES[name].build(0), cache=CACHE) as attached:
            expected[name] = PIPELINES[name].run(attached.pipe, 4)
    for results in ranks.call(_on_a_rank, list(RANKS), limit_s=600.0):
        for name, (picture, told, allowed, left) in zip(RANKS, results, strict=True):
            assert "used; the output differs from the default's by" in told, name
            assert allowed == (set() if name == "CFG 2" else {"math"}), name
            assert difference(picture, expected["qwen-image" if name == "CFG 2" else "flux"]) < 1e-3, name
            assert left == {None}, name
