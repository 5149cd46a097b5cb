"""One `attach` for everything: all checked first, taken off without a trace, and nobody else touched."""

from __future__ import annotations

import copy
import inspect
import io
import json
import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import samovar
from compose.matrix import footprint, num_hooks
from pipelines import PIPELINES
from ranks import Ranks
from samovar import AttachConfig, Attached, SequenceParallelConfig, attach, detach
from samovar.cache import CACHE_BACKENDS, TeaCacheBackend
from samovar.core.errors import ModelError, SamovarError, SettingError
from samovar.hooks import HookRegistry
from samovar.offload import HostStage

STEPS, MASK = 6, "#.##.#"
SCHEDULE = {"schedule": MASK}
FLUX = PIPELINES["flux"]
ALL: dict[str, Any] = {"cache": {"backend": "tea_cache", **SCHEDULE}, "offload": {"mode": "layerwise", "device": "cpu"}}


@pytest.fixture
def pipe() -> Any:
    made = FLUX.build(0)
    FLUX.run(made, 1)  # A pipeline has attributes that its first run gives it.
    return made


def test_it_goes_on_and_comes_off_as_often_as_one_likes(pipe: Any) -> None:
    bare, before = FLUX.run(pipe, STEPS), footprint(pipe)
    with attach(pipe, cache={"backend": "tea_cache", **SCHEDULE}):
        cached = FLUX.run(pipe, STEPS)
    attached = attach(pipe, **ALL)
    assert torch.equal(FLUX.run(pipe, STEPS), cached)
    stats = attached.stats()
    assert stats.cache.skipped == 2 * MASK.count(".")
    assert stats.offload is not None
    assert (stats.offload.sent_bytes > 0, stats.sharding) == (True, {})
    attached.detach()
    attached.detach()
    assert (footprint(pipe), num_hooks(pipe)) == (before, 0)
    assert torch.equal(FLUX.run(pipe, STEPS), bare)
    with attach(pipe, **ALL):
        assert torch.equal(FLUX.run(pipe, STEPS), cached), "attached again"
    assert (footprint(pipe), num_hooks(pipe)) == (before, 0)


def test_a_skipped_step_moves_no_blocks() -> None:
    """With a schedule of half the steps, as many blocks are loaded as those steps have that are computed."""
    tiny, loads = PIPELINES["sd3"], {}
    pipe = tiny.build(0)
    for mask in ("######", MASK):
        with attach(
            pipe, cache={"backend": "tea_cache", "schedule": mask}, offload={"mode": "layerwise", "device": "cpu"}
        ) as attached:
            assert attached.offloaded is not None
            assert attached.offloaded.plan.skipped == mask.count(".") / STEPS
            tiny.run(pipe, STEPS)
            first = attached.offloaded.stats().block_loads
            tiny.run(pipe, STEPS)
            loads[mask] = attached.offloaded.stats().block_loads - first
    num_blocks = len(pipe.transformer.transformer_blocks)
    assert loads["######"] - loads[MASK] == MASK.count(".") * num_blocks


def test_a_lone_denoiser_is_enough() -> None:
    model = PIPELINES["sd3"].build(0).transformer
    before = type(model), set(vars(model))
    with attach(model, "tea_cache", compile="eager", offload={"mode": "layerwise", "device": "cpu"}) as attached:
        assert attached.stats().cache.denoisers == {}
        assert type(model) is not before[0], "something is on it"
    assert (type(model), set(vars(model))) == before


def test_a_copy_of_what_is_attached_to_is_bare(pipe: Any) -> None:
    with attach(pipe.transformer, compile="eager"):
        torch.save(pipe.transformer, file := io.BytesIO())
        for other in (copy.deepcopy(pipe.transformer), torch.load(io.BytesIO(file.getvalue()), weights_only=False)):
            detach(other)
            assert pipe.transformer.transformer_blocks[0]._compiled_call_impl is not None


def test_nothing_asked_for_is_nothing_done_and_said(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    before = footprint(pipe)
    attached = attach(pipe)
    assert footprint(pipe) == before
    assert (repr(attached), str(attached.stats())) == ("<Attached to FluxPipeline: nothing>", "nothing to report")
    assert attached.stats().to_dict() == {}
    (record,) = caplog.records
    assert record.message.startswith("attach() was asked for nothing, so nothing is on this FluxPipeline. Say what")
    for off in (False, "none"):
        assert attach(pipe, off, offload=off, parallel=off).features == ()
    attach(pipe, "none", gpu_memory=None)
    assert len(caplog.records) == 1, "who says that it is off knows"


@pytest.mark.parametrize(("name", "what"), [("vae", "a VAE"), ("text_encoder", "an encoder")])
@pytest.mark.parametrize("cache", ["auto", "tea_cache"])
def test_a_cache_on_what_has_no_steps_is_refused(pipe: Any, name: str, what: str, cache: str) -> None:
    module = getattr(pipe, name)
    before = type(module), set(vars(module))
    with pytest.raises(SettingError, match=f"is {what}, which has no steps that a cache could skip. Attach to the pip"):
        attach(module, cache)
    assert (type(module), set(vars(module))) == before


def test_stats_are_text_and_plain_data_and_stay_when_all_is_off(pipe: Any) -> None:
    with attach(pipe, **ALL) as attached:
        FLUX.run(pipe, STEPS)
        text, stats = str(attached.stats()), attached.stats()
    assert repr(attached.stats()) == str(attached.stats()) == text
    assert text.startswith("cache: transformer: ")
    assert MASK in text
    assert "\noffload: " in text
    assert max(map(len, text.splitlines())) < 160
    found = json.loads(json.dumps(stats.to_dict(), allow_nan=False))
    assert found.keys() == {"cache", "offload"}
    assert found["offload"] == stats.offload.to_dict()
    assert found["offload"]["sent_bytes"] > 0
    assert str(attached.explain()) == repr(attached.explain()) == "FluxPipeline: nothing is attached."
    assert repr(attached) == "<Attached to FluxPipeline: detached>"


def test_help_says_what_may_be_given_what_comes_back_and_what_is_raised() -> None:
    text = pydoc.plain(pydoc.render_doc(attach))
    assert "Literal['exact', 'high', 'fast']" in text
    assert "Literal['graphs', 'inductor']" in text
    assert "Returns:" in text
    assert "Raises:" in text
    names = list(inspect.signature(attach).parameters)[1:-1]
    assert [name for name in names if f"    {name}: " not in text] == []


@pytest.mark.slow
def test_a_misspelt_keyword_is_seen_by_a_type_checker(tmp_path: Path) -> None:
    call = tmp_path / "call.py"
    call.write_text("import samovar\nsamovar.attach(0, ofload='model')\nsamovar.attach(0, cache_adapter='none')\n")
    source = Path(samovar.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", tmp_path, call]
    found = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False).stdout
    assert 'call.py:2: error: Unexpected keyword argument "ofload" for "attach"' in found
    assert "call.py:3" not in found


# ------------------------------------------------------------------------------------------------ refused

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"offload": {"mode": "layerwise", "device": "cpu"}, "gpu_memory": "1MiB"}, "is not enough: at least"),
    ({"parallel": {"cfg_parallel_size": 2}}, "need 2 ranks .* but 1 is running"),
    ({"parallel": SequenceParallelConfig(ring_degree=3)}, "need 3 ranks"),
    ({"offload": "modl"}, "Did you mean 'model'"),
    ({"cache": {"schedul": MASK}}, "Did you mean 'schedule'"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_all_is_checked_before_anything_is_changed(
    pipe: Any, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even for a moment: no hook is registered, and no weight is another tensor."""
    registered: list[str] = []
    bare = HookRegistry.register_hook

    def register(self: HookRegistry, name: str, hook: Any) -> None:
        registered.append(name)
        bare(self, name, hook)

    monkeypatch.setattr(HookRegistry, "register_hook", register)
    before, weights = footprint(pipe), [p.data_ptr() for p in pipe.transformer.parameters()]
    with pytest.raises(SamovarError, match=message):
        attach(pipe, **{"cache": "tea_cache", "compile": "eager"} | settings)
    assert registered == []
    assert footprint(pipe) == before
    assert [p.data_ptr() for p in pipe.transformer.parameters()] == weights
    with attach(pipe, "tea_cache"):
        assert "teacache" in registered, "the watch would have seen it"


def test_twice_is_refused_and_the_first_stays(pipe: Any) -> None:
    first = attach(pipe, **ALL)
    cached, between = FLUX.run(pipe, STEPS), footprint(pipe)
    with pytest.raises(SettingError, match=r"has cache= from an earlier attach.*samovar.detach\(pipe\).*replace=True"):
        attach(pipe, "tea_cache")
    with pytest.raises(SettingError, match="has offload= from an earlier attach"):
        attach(pipe, offload={"mode": "layerwise", "device": "cpu"})
    assert footprint(pipe) == between
    assert torch.equal(FLUX.run(pipe, STEPS), cached)
    first.detach()


def test_a_failure_half_way_undoes_what_was_before(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload comes last: if it fails, as for want of memory, the cache is on already and must come off."""
    before = footprint(pipe)

    def fail(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(HostStage, "register", fail)
    with pytest.raises(MemoryError, match="none left"):
        Attached(pipe, AttachConfig.of(**ALL, compile="eager"))
    monkeypatch.undo()
    assert (footprint(pipe), num_hooks(pipe)) == (before, 0)
    with attach(pipe, **ALL):
        FLUX.run(pipe, STEPS)


def test_detach_finds_what_was_attached_without_the_handle(pipe: Any) -> None:
    before, exact = footprint(pipe), FLUX.run(pipe, STEPS)
    attach(pipe, cache=SCHEDULE)
    attach(pipe, offload={"mode": "layerwise", "device": "cpu"})  # Another feature may be added later.
    assert not torch.equal(FLUX.run(pipe, STEPS), exact)
    detach(pipe)
    assert footprint(pipe) == before
    assert torch.equal(FLUX.run(pipe, STEPS), exact)
    detach(pipe)  # Nothing is left, which is no error.


def test_a_cell_that_is_run_twice_replaces_what_it_attached(pipe: Any) -> None:
    before = footprint(pipe)
    with attach(pipe, cache={"schedule": "#....."}):
        expected = FLUX.run(pipe, STEPS)
    attach(pipe, **ALL)
    attached = attach(pipe, cache={"schedule": "#....."}, replace=True)
    assert attached.features == ("cache",)
    assert torch.equal(FLUX.run(pipe, STEPS), expected)
    with pytest.raises(SettingError, match="is not enough"):
        attach(pipe, offload={"mode": "layerwise", "device": "cpu"}, gpu_memory="1MiB", replace=True)
    assert torch.equal(FLUX.run(pipe, STEPS), expected), "what is refused leaves the earlier one on"
    detach(pipe)
    assert footprint(pipe) == before


def test_it_comes_off_even_if_the_figures_of_the_cache_cannot_be_read(pipe: Any) -> None:
    before = footprint(pipe)
    attached = attach(pipe, **ALL)
    attached.cache.stats = Mock(side_effect=ZeroDivisionError)  # type: ignore[union-attr, method-assign]
    with pytest.raises(ZeroDivisionError):
        attached.detach()
    assert footprint(pipe) == before


@pytest.mark.parametrize("pipe", ["models/flux", None, 3])
def test_a_path_is_not_a_pipeline(pipe: Any) -> None:
    with pytest.raises(SettingError, match=r"is not a pipeline. Load one first.*samovar.Omni"):
        attach(pipe, "auto")


def test_spellings_of_vllm_omni_are_understood_and_unknown_ones_refused(pipe: Any) -> None:
    with attach(pipe, cache_backend="tea_cache", cache_config=SCHEDULE, enable_cpu_offload=True) as attached:
        assert attached.features == ("cache", "offload")
    with pytest.raises(SettingError, match=r"'ofload' is not a setting of attach. Did you mean 'offload'\?"):
        attach(pipe, ofload="model")
    with pytest.raises(SettingError, match="cache and cache_backend were both given"):
        attach(pipe, cache="auto", cache_backend="auto")


def test_a_backend_that_could_not_be_detached_is_refused(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(TeaCacheBackend):
        def enable(self, pipeline: Any) -> Any:
            return None

    monkeypatch.setitem(CACHE_BACKENDS, "forgetful", lambda settings: Forgetful(settings))
    with pytest.raises(SettingError, match=r"enable\(\) of Forgetful returned None; expected a samovar.hooks.Handle"):
        attach(pipe, "forgetful")


def test_a_pipeline_without_denoiser_is_refused() -> None:
    with pytest.raises(ModelError, match="No denoiser was found in object"):
        attach(object(), parallel={"cfg_parallel_size": 2})


# ------------------------------------------------------------------------------------------------ others


def test_another_pipeline_of_the_class_is_left_alone(pipe: Any) -> None:
    other = FLUX.build(1)
    alone = FLUX.run(other, STEPS)
    before = footprint(other)
    with attach(pipe, **ALL) as attached:
        cached = FLUX.run(pipe, STEPS)
        assert footprint(other) == before
        assert torch.equal(FLUX.run(other, STEPS), alone)
        moved = attached.stats().offload
        FLUX.run(other, STEPS)
        assert attached.stats().offload == moved, "its weights are not ours to move"
        with attach(other, offload={"mode": "model", "device": "cpu"}):
            assert torch.equal(FLUX.run(other, STEPS), alone)
            assert torch.equal(FLUX.run(pipe, STEPS), cached)
    assert footprint(other) == before


def mixed(settings: dict[str, Any]) -> tuple[torch.Tensor, str, bool]:
    """On a rank: an image with all of it on, what is said of it, and whether all came off."""
    pipe = FLUX.build(0)
    FLUX.run(pipe, 1)
    before = footprint(pipe)
    with attach(pipe, **settings) as attached:
        image, said = FLUX.run(pipe, STEPS), f"{attached.explain()}\n{attached.stats()}"
    return image, said, (footprint(pipe), num_hooks(pipe)) == (before, 0)


@pytest.mark.parametrize("compiled", [{}, pytest.param({"compile": "eager"}, marks=pytest.mark.slow)])
def test_everything_at_once_on_two_ranks(pipe: Any, ranks: Ranks, compiled: dict[str, Any]) -> None:
    with attach(pipe, cache={"backend": "tea_cache", **SCHEDULE}):
        expected = FLUX.run(pipe, STEPS)
    settings = ALL | compiled | {"parallel": SequenceParallelConfig(ulysses_degree=2)}
    for image, said, is_bare in ranks.call(mixed, settings, limit_s=600.0):
        assert float((image - expected).norm() / expected.norm()) <= 1e-5
        assert is_bare
        for line in ("2 ranks, ulysses", "split by the plan", "decides from the figures of all 2 ranks"):
            assert line in said
        assert ("> compiled" in said) == bool(compiled)
