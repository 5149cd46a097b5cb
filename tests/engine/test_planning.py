"""Plans by settings alone, and which quantisation is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.gguf_files import write_gguf
from samovar import Omni
from samovar.arch.quantised import KINDS
from samovar.compose import AttachConfig
from samovar.core.errors import ModelError, SettingError
from samovar.engine import OmniDiffusionConfig
from samovar.engine.models import load_pipeline
from samovar.engine.planning import check_loss, choose_quantization, make_plan
from samovar.engine.quantize import Quantization
from samovar.offload import OffloadConfig

SIZE = {"height": 1024, "width": 1024}
FLUX = "FluxTransformer2DModel"


def test_each_choice_has_its_memory_and_traffic() -> None:
    made = make_plan(FLUX, OffloadConfig(gpu_memory="6GiB"), SIZE, bus="50GiB")
    assert "s at 50.00 GiB/s" in str(made.plan), "the plan is for that bus"
    found = {rung.name: rung for rung in made.rungs}
    assert list(found) == ["exact", "int8", "fp8", "int4", "nf4"]
    assert found["exact"].weight_bytes > 1.9 * found["int8"].weight_bytes > 3 * found["int4"].weight_bytes
    assert found["exact"].bus_bytes > found["int8"].bus_bytes > found["int4"].bus_bytes
    assert made.plan is found["exact"].plan, "nothing is quantised unless asked"
    assert made.choices[1][-1] == "taken"
    assert [len(row) for row in made.choices] == [5] * 6
    assert made.to_dict()["choices"][1]["name"] == "int8"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "int5", "gpu_memory": "1GiB"}, "loss='int5'"),
        ({"loss": "int8"}, "loss='int8' lets the planner quantise to fit a budget, and there is none"),
        ({"loss": "int8", "gpu_memory": "1GiB", "quantization": "int8"}, "Give one of them"),
    ],
)
def test_bad_levels_are_refused(settings: dict[str, Any], message: str) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(SettingError, match=message):
        OmniDiffusionConfig("emoji", device="cpu", **settings)


def test_what_cannot_fit_is_refused(folder: Path) -> None:
    with pytest.raises(SettingError, match="is not enough: at least"):
        make_plan(str(folder), OffloadConfig(gpu_memory="2KiB"), {"height": 16, "width": 32})
    check_loss("exact", None, None)


def test_vaes_decode_in_parts_where_a_budget_has_no_room_otherwise(folder: Path) -> None:
    size = {"height": 256, "width": 256, "batch": 4}
    roomy = make_plan(str(folder), OffloadConfig(gpu_memory="1GiB"), size).plan
    vae = roomy.component("vae")
    assert vae.activation_bytes > max(one.activation_bytes for one in roomy.components if one is not vae) + 2**21
    budget = vae.num_bytes + vae.activation_bytes - 2**20
    made = make_plan(str(folder), OffloadConfig(gpu_memory=budget), size)
    assert made.plan.peak_bytes <= budget
    assert "VAEs decode with vae_slicing, since gpu_memory is not enough otherwise" in str(made.plan)
    assert "VAEs decode" not in str(roomy)


@pytest.mark.parametrize(
    ("speeds", "message"),
    [
        ({"bus": "0GiB"}, "bus='0GiB'; expected bytes per second, more than 0"),
        ({"bus": "0.1B"}, "bus='0.1B'; expected bytes per second, more than 0"),
    ],
)
def test_speeds_at_which_nothing_moves_are_refused(folder: Path, speeds: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_plan(str(folder), OffloadConfig(gpu_memory="1GiB"), {"height": 16, "width": 32}, **speeds)


def test_a_planned_kind_runs_elsewhere(folder: Path) -> None:
    made = make_plan(str(folder), OffloadConfig(gpu_memory="1GiB"), {"height": 16, "width": 32}, quantization="nf4")
    assert len(made.rungs) == 1, "there is nothing left to choose"
    table = make_plan(str(folder), OffloadConfig(gpu_memory="1GiB"), {"height": 16, "width": 32})
    assert made.choices[1] == next(row for row in table.choices if row[0] == "nf4")
    exact = make_plan(str(folder), OffloadConfig(gpu_memory="1GiB"), {"height": 16, "width": 32}, loss="exact")
    assert made.plan.component("transformer").num_bytes < exact.plan.component("transformer").num_bytes


def test_quantised_folders_and_files(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = str(write_gguf(tmp_path / "q8.gguf", load_pipeline(folder, torch.float32).transformer))
    config, size = OffloadConfig(gpu_memory="2GiB"), {"height": 16, "width": 32}
    lone = make_plan(file, config, size)
    assert lone.plan.component("transformer").num_blocks == 5
    beside = make_plan(str(folder), config, size, quantization=file)
    exact = make_plan(str(folder), config, size)
    assert beside.plan.component("transformer").num_bytes < exact.plan.component("transformer").num_bytes
    with pytest.raises(SettingError, match="is quantised already"):
        make_plan(file, config, size, quantization="int8")


def test_the_engine_takes_exact_weights_where_they_stay_on_the_gpu(folder: Path) -> None:
    pytest.importorskip("torchao")
    with Omni(str(folder), device="cpu", progress=False, gpu_memory="1GiB", loss="int8") as omni:
        said = omni.explain().features[0]
        assert (said.name, said.settings) == ("quantization", "none")
        assert "exact weights stay on the GPU" in said.why


def test_the_engine_climbs_down_and_says_why(folder: Path) -> None:
    """A budget for the transformer alone, between the least that exact weights need and the least of 8 bits."""
    pytest.importorskip("torchao")
    others = "vae,text_encoder,text_encoder_2"
    offload = {"gpu_memory": "66KiB", "activations": 0, "exclude": others}
    with pytest.raises(SettingError, match="is not enough: at least 71"):
        make_plan(str(folder), OffloadConfig(**offload), {"height": 16, "width": 32}, loss="exact")
    with Omni(str(folder), device="cpu", progress=False, offload=offload, loss="int8") as omni:
        said = {feature.name: feature for feature in omni.explain().features}
        assert said["quantization"].settings == "transformer as torchao Float8WeightOnlyConfig"
        assert "fp8 weights" in said["quantization"].why
        assert said["quantization"].why.endswith("exact weights do not fit.")
        drawn = image_of(omni)
    with Omni(str(folder), device="cpu", progress=False, quantization="fp8") as omni:
        assert image_of(omni) == drawn, "those weights, and no others"
    with Omni(str(folder), device="cpu", progress=False) as omni:
        assert image_of(omni) != drawn


def image_of(omni: Omni) -> bytes:
    (result,) = omni.generate("a cat", seed=1)
    return result.images[0].tobytes()


def test_what_is_not_here_is_left_out_with_the_reason(folder: Path) -> None:
    pytest.importorskip("torchao")
    config, cpu = AttachConfig.of(gpu_memory="1GiB", device="cpu"), torch.device("cpu")
    taken, why = choose_quantization(folder, torch.float32, cpu, config, {"height": 16, "width": 32}, "int4")
    assert taken is None
    assert "'nf4' does not run on cpu" in why
    quantised = folder.parent / "int8"
    pipe = load_pipeline(
        folder,
        torch.float32,
        quantization=OmniDiffusionConfig(str(folder), device="cpu", quantization="int8").quantised(),
    )
    pipe.save_pretrained(quantised)
    with pytest.raises(ModelError, match="is quantised already"):
        choose_quantization(quantised, torch.float32, cpu, config, {}, "int8")
    with pytest.raises(
        ModelError, match=r"is quantised already: transformer as torchao Int8WeightOnlyConfig\. Leave out"
    ):
        make_plan(str(quantised), OffloadConfig(gpu_memory="1GiB"), {}, loss="int8")
    made = make_plan(str(quantised), OffloadConfig(gpu_memory="1GiB"), {"height": 16, "width": 32})
    assert made.choices[1][0] == "torchao Int8WeightOnlyConfig", "with its memory and traffic"


def test_an_encoder_that_is_quantised_leaves_the_choice(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    setting = Quantization.read({"text_encoder_2": "int8"}, torch.device("cpu"))
    load_pipeline(folder, torch.float32, quantization=setting).save_pretrained(tmp_path / "encoder")
    config, size = OffloadConfig(gpu_memory="1GiB"), {"height": 16, "width": 32}
    saved = make_plan(str(tmp_path / "encoder"), config, size, loss="int8")
    asked = make_plan(str(folder), config, size, quantization={"text_encoder_2": "int8"})
    assert [rung.name for rung in saved.rungs] == [rung.name for rung in asked.rungs] == ["exact", *KINDS]
    exact = make_plan(str(folder), config, size)
    sizes = [made.plan.component("text_encoder_2").num_bytes for made in (saved, asked, exact)]
    assert sizes[0] == sizes[1] != sizes[2]


def test_the_engine_finds_room_as_attach_does(folder: Path) -> None:
    """A budget that is enough only if the VAE decodes image by image; and for videos, the frames count."""
    pytest.importorskip("torchao")
    size = {"height": 256, "width": 256, "batch": 4}
    vae = make_plan(str(folder), OffloadConfig(gpu_memory="1GiB"), size).plan.component("vae")
    budget = vae.num_bytes + vae.activation_bytes - 2**20
    given = {"device": "cpu", "progress": False, "gpu_memory": budget, "max_batch": 4}
    defaults = {"height": 256, "width": 256}
    with Omni(str(folder), loss="int8", defaults=defaults, **given) as omni:
        assert "exact weights" in omni.explain().features[0].why
    with pytest.raises(SettingError, match="is not enough"):
        Omni(str(folder), loss="int8", defaults=defaults, vae_slicing=False, vae_tiling=False, **given)
