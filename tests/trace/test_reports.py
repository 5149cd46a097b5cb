"""What is said of a model: of a class, a folder, and a loaded pipeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.engine.models import load_pipeline
from samovar.engine.quantize import Quantization
from samovar.trace import ModelReport, survey, survey_pipeline


def works(report: ModelReport) -> dict[str, bool | None]:
    return {feature.name: feature.works for feature in report.features}


def test_a_class() -> None:
    report = survey("FluxTransformer2DModel")
    (part,) = report.components
    assert (report.class_name, report.dtype) == ("FluxTransformer2DModel", "bfloat16")
    assert (part.role, part.num_bytes) == ("denoiser", 2 * part.num_parameters)
    assert [len(stack) for stack in part.anatomy.stacks] == [19, 38]
    assert works(report) == {
        "step cache": True, "layerwise offload": True, "model offload": False, "sequence parallel": True,
    }  # fmt: skip


def test_where_a_plan_for_sequence_parallel_comes_from() -> None:
    reasons = {name: survey(name).features[-1].reason for name in ("FluxTransformer2DModel", "SD3Transformer2DModel")}
    assert reasons["FluxTransformer2DModel"] == "a plan comes with transformer"
    assert reasons["SD3Transformer2DModel"].startswith("a plan is derived")


def test_a_loaded_pipeline_and_a_bare_transformer() -> None:
    pipe = tiny_flux_pipeline()
    report = survey_pipeline(pipe)
    assert [part.name for part in report.components] == ["transformer", "text_encoder", "text_encoder_2", "vae"]
    assert all(works(report).values())
    bare = survey_pipeline(pipe.transformer)
    assert [part.name for part in bare.components] == ["transformer"]
    assert bare.components[0].num_bytes == report.components[0].num_bytes


def test_what_has_no_blocks_is_ready_for_nothing() -> None:
    report = survey_pipeline(torch.nn.Linear(2, 2))
    assert works(report) == dict.fromkeys(works(report), False)
    assert len(report.features) == 4


def test_what_needs_a_checkpoint_to_be_known_is_said_to_be_unknown() -> None:
    report = survey("LattePipeline")
    assert works(report) == {
        "step cache": True, "layerwise offload": None, "model offload": True, "sequence parallel": None,
    }  # fmt: skip
    unknown = [feature for feature in report.features if feature.works is None]
    assert all(
        "unknown without a checkpoint, which says how LatteTransformer3DModel is" in feature.reason
        for feature in unknown
    )
    assert json.loads(json.dumps(report.to_dict()))["features"][1]["works"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_that_of_most_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Wan keeps some in float32, its first parameter among them."""
    pipe = PIPELINES["wan"].build(0)
    pipe.transformer.to(dtype)
    pipe.transformer.scale_shift_table.data = pipe.transformer.scale_shift_table.data.float()
    pipe.transformer.save_pretrained(tmp_path)
    assert survey(str(tmp_path)).dtype == survey_pipeline(pipe).dtype == str(dtype).removeprefix("torch.")


def test_packed_weights_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    pytest.importorskip("sdnq")
    tiny_flux_pipeline().save_pretrained(tmp_path / "exact")
    setting = Quantization.read("int4", torch.device("cpu"))
    load_pipeline(tmp_path / "exact", torch.float32, quantization=setting).save_pretrained(tmp_path / "int4")
    exact, read = survey(str(tmp_path / "exact")), survey(str(tmp_path / "int4"))
    counts = [[part.num_parameters for part in report.components] for report in (exact, read)]
    assert counts[0] == counts[1]
    assert (read.components[0].num_bytes or 0) < (exact.components[0].num_bytes or 0)
