"""Plans by settings alone, and which quantisation is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import ask, pixels, worker_of

from pipelines.gguf_files import write_gguf
from samovar.arch.quantised import KINDS
from samovar.core.errors import ModelError, SettingError
from samovar.engine.models import load_pipeline
from samovar.engine.planning import make_plan
from samovar.engine.quantize import Quantization
from samovar.offload import OffloadConfig

TINY = {"height": 16, "width": 32}
ROOMY = OffloadConfig(gpu_memory="1GiB")
CPU = torch.device("cpu")


def test_each_choice_has_its_memory_and_traffic() -> None:
    size = {"height": 1024, "width": 1024}
    made = make_plan("FluxTransformer2DModel", OffloadConfig(gpu_memory="6GiB"), size, bus="50GiB")
    assert "s at 50.00 GiB/s" in str(made.plan), "the plan is for that bus"
    found = {rung.name: rung for rung in made.rungs}
    assert list(found) == ["exact", "int8", "fp8", "int4", "nf4"]
    assert found["exact"].weight_bytes > 1.9 * found["int8"].weight_bytes > 3 * found["int4"].weight_bytes
    assert found["exact"].bus_bytes > found["int8"].bus_bytes > found["int4"].bus_bytes
    assert made.plan == found["exact"].plan, "nothing is quantised unless asked"
    assert made.choices[1][-1] == "taken"
    assert [len(row) for row in made.choices] == [5] * 6
    assert made.to_dict()["choices"][1]["name"] == "int8"


@pytest.mark.parametrize(
    ("config", "how", "message"),
    [
        (OffloadConfig(gpu_memory="2KiB"), {}, "is not enough: at least"),
        (ROOMY, {"bus": "0GiB"}, "bus='0GiB'; expected bytes per second, more than 0"),
        (ROOMY, {"loss": "int5"}, "loss='int5'"),
    ],
)
def test_what_cannot_be_planned_is_refused(folder: Path, config: Any, how: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make_plan(str(folder), config, TINY, **how)


def test_vaes_decode_in_parts_where_a_budget_has_no_room_otherwise(folder: Path) -> None:
    size = {"height": 256, "width": 256, "batch": 4}
    roomy = make_plan(str(folder), ROOMY, size).plan
    vae = roomy.component("vae")
    budget = vae.num_bytes + vae.activation_bytes - 2**20
    made = make_plan(str(folder), OffloadConfig(gpu_memory=budget), size)
    assert made.plan.peak_bytes <= budget
    assert "VAEs decode with vae_slicing, since gpu_memory is not enough otherwise" in str(made.plan)
    assert "VAEs decode" not in str(roomy)
    pytest.importorskip("torchao")
    given = {"gpu_memory": budget, "max_batch": 4, "loss": "int8", "defaults": {"height": 256, "width": 256}}
    worker = worker_of(folder, **given)
    assert "exact weights" in worker.explain().features[0].why, "the engine finds room as the plan does"
    worker.close()
    with pytest.raises(SettingError, match="is not enough"):
        worker_of(folder, vae_slicing=False, vae_tiling=False, **given)


def test_quantised_folders_and_files(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = str(write_gguf(tmp_path / "q8.gguf", load_pipeline(folder, torch.float32).transformer))
    beside, exact = make_plan(str(folder), ROOMY, TINY, quantization=file), make_plan(str(folder), ROOMY, TINY)
    assert beside.plan.component("transformer").num_bytes < exact.plan.component("transformer").num_bytes
    pytest.importorskip("torchao")
    for part, quantised in (("transformer", True), ("text_encoder_2", False)):
        saved = tmp_path / part
        setting = Quantization.read({part: "int8"}, CPU)
        load_pipeline(folder, torch.float32, quantization=setting).save_pretrained(saved)
        if quantised:
            with pytest.raises(ModelError, match="is quantised already: transformer as torchao Int8"):
                make_plan(str(saved), ROOMY, {}, loss="int8")
            assert make_plan(str(saved), ROOMY, TINY).choices[1][0] == "torchao Int8WeightOnlyConfig"
        else:
            made = make_plan(str(saved), ROOMY, TINY, loss="int8")
            assert [rung.name for rung in made.rungs] == ["exact", *KINDS], "an encoder leaves the choice"


def test_the_engine_takes_exact_weights_where_they_fit_and_else_climbs_down_and_says_why(folder: Path) -> None:
    """A budget for the transformer alone, between the least that exact weights need and the least of 8 bits."""
    pytest.importorskip("torchao")
    worker = worker_of(folder, gpu_memory="1GiB", loss="int8")
    said = worker.explain().features[0]
    assert (said.name, said.settings) == ("quantization", "none")
    assert "exact weights stay on the GPU" in said.why
    worker.close()
    offload = {"gpu_memory": "66KiB", "activations": 0, "exclude": "vae,text_encoder,text_encoder_2"}
    with pytest.raises(SettingError, match="is not enough: at least 72KiB"):
        make_plan(str(folder), OffloadConfig(**offload), TINY, loss="exact")  # type: ignore[arg-type]
    worker = worker_of(folder, offload=offload, loss="int8")
    said = worker.explain().features[0]
    assert said.settings == "transformer as torchao Float8WeightOnlyConfig"
    assert said.why.endswith("exact weights do not fit.")
    drawn = pixels(worker.make(ask())).tobytes()
    assert pixels(worker_of(folder, quantization="fp8").make(ask())).tobytes() == drawn, "those weights, and no others"
    made = make_plan(str(folder), ROOMY, TINY, loss="int4", device=CPU)
    assert made.taken == "exact"
    assert "'nf4' does not run on cpu" in made.why
