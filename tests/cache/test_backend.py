"""Backends: chosen by name or by the environment, on pipelines and off again without a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from driving import COND, INFINITE, UNGUARDED, Plain, at

from pipelines import PIPELINES, images
from samovar.cache import (
    CACHE_BACKENDS,
    AutoConfig,
    CacheBackend,
    PipelineStats,
    TeaCacheBackend,
    TeaCacheConfig,
    cache_names,
    make_cache_backend,
    register_cache_backend,
)
from samovar.core.errors import ModelError, SamovarError, SettingError
from samovar.hooks import (
    Handle,
    HookRegistry,
)

FLUX, WAN = PIPELINES["flux"], PIPELINES["wan"]
VARIABLE = "DIFFUSION_CACHE_BACKEND"
FAST: dict[str, Any] = {"rel_l1_thresh": float("inf"), "max_skips": 2}
STEPS = 9
FAST_MASK = "#..#..#.#"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No backend in the environment, and the registry as it was."""
    monkeypatch.delenv(VARIABLE, raising=False)
    before = dict(CACHE_BACKENDS)
    yield
    CACHE_BACKENDS.clear()
    CACHE_BACKENDS.update(before)


def footprint(*owners: Any) -> list[tuple[int, type, frozenset[str]]]:
    """What every module is and has, of modules and of pipelines; and the same of these themselves."""
    parts: list[Any] = []
    for owner in owners:
        components = getattr(owner, "components", None)
        held = [owner] if isinstance(owner, torch.nn.Module) else [*(components or vars(owner)).values(), owner]
        for part in held:
            parts += (
                part.modules() if isinstance(part, torch.nn.Module) else [part] if hasattr(part, "__dict__") else []
            )
    return [(id(part), type(part), frozenset(vars(part))) for part in parts]


def masks(stats: PipelineStats) -> dict[str, set[str]]:
    return {name: {branch.mask for branch in found.branches.values()} for name, found in stats.denoisers.items()}


@pytest.fixture(scope="module")
def flux() -> tuple[Any, torch.Tensor]:
    """A pipeline that has run once, and what it gives bare."""
    pipe = FLUX.build(0)
    return pipe, FLUX.run(pipe, STEPS)


# ------------------------------------------------------------------------------------------------ by name


def test_by_name() -> None:
    backend = make_cache_backend({"backend": "tea_cache", "rel_l1_thresh": 0.3})
    assert isinstance(backend, TeaCacheBackend)
    assert isinstance(backend, CacheBackend)
    assert backend.config == TeaCacheConfig(0.3)
    assert make_cache_backend("tea_cache").config == TeaCacheConfig()  # type: ignore[union-attr]
    assert cache_names() == ["auto", "cache_dit", "tea_cache"]
    for setting in (True, "auto", {"backend": "auto"}, {"tolerance": "high"}, AutoConfig("high")):
        backend = make_cache_backend(setting)
        assert isinstance(backend, TeaCacheBackend)
        assert backend.config == AutoConfig()


def test_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "auto")
    assert make_cache_backend().config == AutoConfig()  # type: ignore[union-attr]
    assert make_cache_backend("tea_cache").config.forecast == "reuse", "a name comes first"  # type: ignore[union-attr]
    assert make_cache_backend("none") is None, "so does the wish for none"
    monkeypatch.setenv(VARIABLE, "tea_cache")
    assert make_cache_backend({"rel_l1_thresh": 0.1}).config.rel_l1_thresh == 0.1  # type: ignore[union-attr]
    monkeypatch.setenv(VARIABLE, "none")
    assert make_cache_backend() is None
    monkeypatch.setenv(VARIABLE, "")
    assert make_cache_backend() is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("teacache", "tea_cache"),
        ("TEA_CACHE", "tea_cache"),
        ("tee_cache", "tea_cache"),
        ("cache-dit", "cache_dit"),
        ("nonne", "none"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match=f"cache='{name}' is not a cache backend. Did you mean '{hint}'"):
        make_cache_backend(name)
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(SettingError, match=f"{VARIABLE}='{name}' is not a cache backend. Did you mean '{hint}'"):
        make_cache_backend()


@pytest.mark.parametrize("cache", [3, ["tea_cache"], 0.2], ids=["number", "list", "float"])
def test_anything_but_a_name_a_config_a_mapping_or_a_file_is_refused(cache: Any) -> None:
    with pytest.raises(SettingError, match=r"cache=.*; expected a name") as caught:
        make_cache_backend(cache)
    assert caught.value.param == "cache"
    with pytest.raises(SettingError, match=r"cache: backend=.*; expected a name such as 'tea_cache'"):
        make_cache_backend({"backend": cache})


# ------------------------------------------------------------------------------------------------ one's own


class Own:
    """A backend that a user wrote."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.calls: list[Any] = []

    def enable(self, pipeline: Any) -> Handle:
        self.calls.append(("enable", pipeline))
        return Handle()

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        self.calls.append(("refresh", num_inference_steps))

    def stats(self) -> Any:
        return self.calls


def test_a_users_own_is_chosen_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    register_cache_backend("mine", Own)
    backend = make_cache_backend({"backend": "mine", "level": 3})
    assert isinstance(backend, Own)
    assert backend.settings == {"level": 3}
    monkeypatch.setenv(VARIABLE, "mine")
    assert isinstance(make_cache_backend(), Own)
    with pytest.raises(SettingError, match="Did you mean 'mine'"):
        make_cache_backend("mien")


@pytest.mark.parametrize("missing", ["enable", "refresh", "stats"])
def test_one_that_lacks_a_method_is_refused(missing: str) -> None:
    methods = {name: getattr(Own, name) for name in ("__init__", "enable", "refresh", "stats")}
    register_cache_backend("half", type("Half", (), {name: m for name, m in methods.items() if name != missing}))
    with pytest.raises(SettingError, match=rf"'half' is a Half, which lacks .*{missing}"):
        make_cache_backend("half")


@pytest.mark.parametrize(("name", "factory"), [(3, Own), (None, Own), ("mine", None), ("mine", "Own")])
def test_nonsense_is_not_registered(name: Any, factory: Any) -> None:
    before = dict(CACHE_BACKENDS)
    with pytest.raises(SettingError, match="a name and a function"):
        register_cache_backend(name, factory)
    assert before == CACHE_BACKENDS


# ------------------------------------------------------------------------------------------------ on and off


@pytest.mark.parametrize("name", ["tea_cache"])
def test_on_off_and_on_again(flux: tuple[Any, torch.Tensor], name: str) -> None:
    pipe, bare = flux
    before = footprint(pipe)
    backend = make_cache_backend({"backend": name, **FAST})
    assert backend is not None
    results = []
    for _ in range(2):
        handle = backend.enable(pipe)
        results.append(FLUX.run(pipe, STEPS))
        assert masks(backend.stats()) == {"transformer": {FAST_MASK}}
        handle.detach()
        assert footprint(pipe) == before
        assert torch.equal(FLUX.run(pipe, STEPS), bare)
    assert torch.equal(*results)
    assert not torch.equal(results[0], bare)


# ------------------------------------------------------------------------------------------------ refresh


def test_refresh_says_how_long_a_loop_of_ones_own_is() -> None:
    model, backend = Plain(), TeaCacheBackend(FAST)
    handle = backend.enable(model)
    for steps, mask in ((STEPS, FAST_MASK), (6, "######"), (STEPS, FAST_MASK)):
        backend.refresh(model, steps)
        with torch.no_grad():
            for step in range(steps):
                model(*at(step, steps), COND)
        assert masks(backend.stats()) == {"Plain": {mask}}
    handle.detach()


@pytest.mark.parametrize("steps", [0, -1, 2.5, "12", True], ids=str)
def test_a_number_of_steps_that_cannot_be_is_refused(steps: Any) -> None:
    model, backend = Plain(), TeaCacheBackend(FAST)
    backend.enable(model)
    with pytest.raises(SettingError, match=f"{steps!r}"):
        backend.refresh(model, steps)


# ------------------------------------------------------------------------------------------------ which denoisers


def test_two_denoisers_each_with_its_own_steps() -> None:
    pipe = WAN.build(0)
    bare, before = WAN.run(pipe, 12), footprint(pipe)
    backend = TeaCacheBackend(FAST)
    handle = backend.enable(pipe)
    WAN.run(pipe, 12)
    stats = backend.stats()
    assert list(masks(stats)) == ["transformer", "transformer_2"]
    assert sum(len(mask) for found in masks(stats).values() for mask in found) == 12
    assert all(mask.startswith("#..#") for found in masks(stats).values() for mask in found)
    WAN.run(pipe, 1)
    assert masks(backend.stats()) == {"transformer": {"#"}}, "the second had no part in the most recent run"
    handle.detach()
    assert footprint(pipe) == before
    assert torch.equal(WAN.run(pipe, 12), bare)


def test_a_pipeline_that_cannot_be_hooked_leaves_its_denoiser_untouched() -> None:
    class Final:
        def __init__(self) -> None:
            self.transformer = Plain()

        def __init_subclass__(cls) -> None:
            raise TypeError("this class is final")

    pipe = Final()
    before, backend = footprint(pipe), TeaCacheBackend(FAST)
    with pytest.raises(SettingError, match="Final"):
        backend.enable(pipe)
    assert footprint(pipe) == before
    handle = backend.enable(pipe.transformer)
    handle.detach()


class Holder:
    """A pipeline of one's own."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None


class Declares(Holder):
    _dit_modules: ClassVar[list[str]] = ["net"]
    _encoder_modules: ClassVar[list[str]] = []
    _vae_modules: ClassVar[list[str]] = []


@pytest.mark.parametrize(
    ("pipe", "says"),
    [
        (Holder(), "No denoiser was found in Holder"),
        (Holder(vae=torch.nn.Linear(1, 1)), "No denoiser was found in Holder"),
        (Holder(transformer=torch.nn.Linear(1, 1)), "Linear has no stack of blocks"),
        (Declares(net=torch.nn.Linear(1, 1)), "Linear has no stack of blocks"),
        (torch.nn.Linear(1, 1), "Linear has no stack of blocks"),
        (object(), "No denoiser was found in object"),
        (None, "No denoiser was found in NoneType"),
    ],
    ids=["empty", "vae", "linear", "declared", "module", "object", "None"],
)
def test_a_pipeline_without_a_denoiser_is_refused(pipe: Any, says: str) -> None:
    before = footprint(pipe) if hasattr(pipe, "__dict__") else []
    with pytest.raises(ModelError, match=says):
        TeaCacheBackend().enable(pipe)
    assert before == (footprint(pipe) if hasattr(pipe, "__dict__") else [])


class ModulePipeline(torch.nn.Module):
    """A pipeline that is a module, as other libraries have them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Plain()
        self.text_encoder = Plain()

    @torch.no_grad()
    def forward(self, steps: int = STEPS) -> torch.Tensor:
        sample, _ = at(0)
        for step in range(steps):
            sample = sample - self.transformer(sample, torch.full((1,), 1.0 - step / steps), COND) / steps
        return sample


class DeclaringModulePipeline(ModulePipeline):
    _dit_modules: ClassVar[list[str]] = ["transformer"]
    _encoder_modules: ClassVar[list[str]] = ["text_encoder"]
    _vae_modules: ClassVar[list[str]] = []


@pytest.mark.parametrize("cls", [ModulePipeline, DeclaringModulePipeline])
def test_a_pipeline_that_is_a_module(cls: type[ModulePipeline]) -> None:
    pipe = cls()
    bare, before = pipe(), footprint(pipe)
    backend = TeaCacheBackend({**FAST, "last_steps": 0, "min_steps": 0})
    handle = backend.enable(pipe)
    assert "teacache" in HookRegistry.get_or_create(pipe.transformer), "its denoiser, and not the whole of it"
    assert "teacache" not in HookRegistry.get_or_create(pipe.text_encoder)
    first = pipe()
    assert masks(backend.stats()) == {"transformer": {"#..#..#.."}}
    assert torch.equal(pipe(), first), "each call is a run of its own"
    handle.detach()
    assert footprint(pipe) == before
    assert torch.equal(pipe(), bare)


def test_two_pipelines_on_one_backend() -> None:
    """The most recent run is that of the pipeline that ran last, whichever was enabled last."""
    pipes = [FLUX.build(seed) for seed in range(2)]
    bare = [FLUX.run(pipe, STEPS) for pipe in pipes]
    backend = TeaCacheBackend(FAST)
    handles = [backend.enable(pipe) for pipe in pipes]
    cached = FLUX.run(pipes[0], STEPS)
    assert masks(backend.stats()) == {"transformer": {FAST_MASK}}
    FLUX.run(pipes[1], STEPS + 1)
    assert masks(backend.stats()) == {"transformer": {"#..#..#..#"}}
    handles[1].detach()
    assert torch.equal(FLUX.run(pipes[1], STEPS), bare[1])
    assert torch.equal(FLUX.run(pipes[0], STEPS), cached)
    assert masks(backend.stats()) == {"transformer": {FAST_MASK}}
    handles[0].detach()
    assert torch.equal(FLUX.run(pipes[0], STEPS), bare[0])


# ------------------------------------------------------------------------------------------------ a UNet


def test_a_unet_is_cached_exactly_or_refused() -> None:
    """Its attention blocks are stacks as well; what is between them is computed at every step."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=2, cross_attention_dim=8,
        attention_head_dim=2, transformer_layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipe = StableDiffusionPipeline(
        images._kl_vae(4), None, None, unet.eval(), DDIMScheduler(steps_offset=1, clip_sample=False), None, None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    prompts = {"prompt_embeds": torch.randn(1, 6, 8), "negative_prompt_embeds": torch.randn(1, 6, 8)}

    def run() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        result: torch.Tensor = pipe(
            **prompts, num_inference_steps=12, output_type="latent", generator=generator, return_dict=False,
            height=16, width=16,
        )[0]  # fmt: skip
        return result

    bare, before = run(), footprint(pipe)
    for settings, mask in (({"rel_l1_thresh": 0}, "#" * 12), ({"rel_l1_thresh": float("inf")}, "#....#....##")):
        backend = TeaCacheBackend(settings)
        try:
            handle = backend.enable(pipe)
        except SamovarError:
            assert footprint(pipe) == before
            return
        cached = run()
        assert masks(backend.stats()) == {"unet": {mask}}
        assert torch.equal(cached, bare) is (settings["rel_l1_thresh"] == 0)
        assert float((cached - bare).norm() / bare.norm()) < 0.1
        handle.detach()
        assert footprint(pipe) == before
    assert torch.equal(run(), bare)


def test_while_it_is_paused_everything_is_computed_and_nothing_forgotten() -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    exact = tiny.run(pipe, 12)
    backend = TeaCacheBackend({**UNGUARDED, "rel_l1_thresh": INFINITE})
    handle = backend.enable(pipe)
    cached_before = tiny.run(pipe, 12)
    with backend.paused():
        assert torch.equal(tiny.run(pipe, 12), exact)
        assert backend.stats().skipped == 0
    assert torch.equal(tiny.run(pipe, 12), cached_before)
    assert backend.stats().skipped > 0
    assert not torch.equal(cached_before, exact)
    handle.detach()


def test_settings_are_read_from_the_file_that_they_were_saved_in(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"cache": {"backend": "tea_cache", "rel_l1_thresh": 0.3}, "promise": "PSNR of 30 dB"}))
    for given in (file, str(file)):
        backend = make_cache_backend(given)
        assert isinstance(backend, TeaCacheBackend)
        assert backend.config == TeaCacheConfig(0.3)
    file.write_text('{"rel_l1_thresh": 0.3}')
    backend = make_cache_backend(file)
    assert isinstance(backend, TeaCacheBackend)
    assert backend.config == TeaCacheConfig(0.3)
    with pytest.raises(SettingError, match=r"nowhere.json' cannot be read: .*No such file"):
        make_cache_backend(tmp_path / "nowhere.json")
    file.write_text("{")
    with pytest.raises(SettingError, match=r"tuned.json' cannot be read: Expecting property name"):
        make_cache_backend(file)
