"""VAEs decode in parts while that is attached, and as before afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from compose.matrix import footprint
from pipelines import PIPELINES
from samovar import Omni, attach
from samovar.compose import AttachConfig, tiled_if_needed
from samovar.core.errors import SettingError


def settings_of(vae: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(vae).items() if isinstance(value, (bool, int, float))}


@pytest.mark.parametrize("name", ["flux", "wan", "ltx"])
def test_on_and_off(name: str) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    before, settings = footprint(pipe), settings_of(pipe.vae)
    with attach(pipe, vae_tiling=True, vae_slicing=True) as attached:
        assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == (True, True)
        assert "VAE: vae_tiling, vae_slicing: " in str(attached.explain())
    assert settings_of(pipe.vae) == settings
    assert footprint(pipe) == before


@pytest.mark.filterwarnings("ignore")
def test_a_vae_that_decodes_in_tiles_alone_gets_them() -> None:
    """It would refuse its latents when all steps are done."""
    import diffusers

    from pipelines.builder import build
    from pipelines.recipes import RECIPES

    pipe = build(diffusers.AllegroPipeline, RECIPES["AllegroPipeline"])
    assert tiled_if_needed(pipe, AttachConfig.of()).vae_tiling is True
    assert tiled_if_needed(pipe, AttachConfig.of(vae_tiling=False)).vae_tiling is False, "unless that is refused"
    assert tiled_if_needed(PIPELINES["flux"].build(0), AttachConfig.of()).vae_tiling is None
    with Omni(pipe, progress=False) as omni:
        assert pipe.vae.use_tiling
        assert "vae_tiling" in str(omni.explain())
    assert not pipe.vae.use_tiling


def test_slices_are_the_same_images() -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.build(0)
    call = {"prompt": ["a cat", "a dog"], "negative_prompt": ["x", "y"], "output_type": "pt"}
    expected = tiny.run(pipe, 2, **call)
    with attach(pipe, vae_slicing=True):
        assert torch.allclose(tiny.run(pipe, 2, **call), expected, atol=1e-5)


def test_what_has_no_such_vae_is_refused() -> None:
    pipe = PIPELINES["flux"].build(0)
    with pytest.raises(SettingError, match=r"no VAE here can do that \(found: none\)"):
        attach(pipe.transformer, vae_tiling=True)
    with pytest.raises(SettingError, match="vae_tiling=2; expected True or False"):
        attach(pipe, vae_tiling=2)  # type: ignore[arg-type]
    with attach(pipe, vae_tiling=True), pytest.raises(SettingError, match="has vae_tiling= from an earlier attach"):
        attach(pipe, vae_tiling=True)


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_channels_last(name: str) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    expected = tiny.run(pipe, 2, output_type="pt")
    before = footprint(pipe)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    for more in ({}, {"offload": {"mode": "model", "device": "cpu"}}):
        with attach(pipe, vae_channels_last=True, **more) as attached:
            wide = [weight for weight in pipe.vae.parameters() if weight.dim() in last]
            assert wide
            if not more:
                assert all(weight.is_contiguous(memory_format=last[weight.dim()]) for weight in wide)
            assert torch.allclose(tiny.run(pipe, 2, output_type="pt"), expected, atol=1e-4)
            assert "vae_channels_last: " in str(attached.explain())
        assert footprint(pipe) == before
        assert torch.equal(tiny.run(pipe, 2, output_type="pt"), expected)


@pytest.mark.parametrize(
    ("size", "way"), [({"batch": 4, "height": 256, "width": 256}, "vae_slicing"), ({"height": 512}, "vae_tiling")]
)
def test_the_planner_divides_what_a_budget_has_no_room_for(
    size: dict[str, int], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = PIPELINES["flux"].build(0)
    pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 128, 256  # Few tiles.
    before, settings = footprint(pipe), settings_of(pipe.vae)
    offload = {"mode": "model", "device": "cpu", "width": 512, **size}
    never: dict[str, Any] = {"vae_tiling": False, "vae_slicing": False}
    with pytest.raises(SettingError, match=r"at least .* is needed, because of vae") as refused:
        attach(pipe, offload=offload, gpu_memory="33MiB", **never)
    needed = re.search(r"at least (\d+)MiB", str(refused.value))
    assert needed is not None
    budget = (int(needed[1]) - 1) * 2**20
    with pytest.raises(SettingError, match="is not enough"):
        attach(pipe, offload=offload, gpu_memory=budget, **never)
    with attach(pipe, offload=offload, gpu_memory=budget) as attached:
        assert getattr(pipe.vae, way.replace("vae", "use"))
        assert pipe.vae.use_tiling == (way == "vae_tiling"), "only if nothing less will do"
        assert way in attached.features
        assert "gpu_memory is not enough without" in str(attached.explain())
        assert attached.offloaded is not None
        assert attached.offloaded.plan.peak_bytes <= budget
    assert way in caplog.text
    assert caplog.text.count("since gpu_memory is not enough otherwise") == 1
    assert settings_of(pipe.vae) == settings
    assert footprint(pipe) == before
