"""The report: components, stacks, what the model is ready for."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pipelines import tiny_flux_pipeline
from samovar.arch import ModelReport, survey, survey_by_running, survey_pipeline


def works(report: ModelReport) -> dict[str, bool]:
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


def test_components_come_in_order_of_their_role() -> None:
    report = survey("WanPipeline")
    assert [part.name for part in report.components] == ["transformer", "transformer_2", "text_encoder", "vae"]
    assert report.components[2].num_bytes is None
    assert works(report)["model offload"]


def test_where_a_plan_for_sequence_parallel_comes_from() -> None:
    reasons = {name: survey(name).features[-1].reason for name in ("FluxTransformer2DModel", "SD3Transformer2DModel")}
    assert reasons["FluxTransformer2DModel"] == "the plan comes with transformer"
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


def test_running_adds_what_the_streams_hold(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    report = survey_by_running(str(tmp_path))
    kinds = [
        stream.kind for part in report.components if part.anatomy for s in part.anatomy.stacks for stream in s.streams
    ]
    assert kinds == ["text", "image", "text", "image"]
    data = json.loads(json.dumps(report.to_dict()))
    assert data["components"][0]["anatomy"]["stacks"][0]["streams"][0] == {
        "parameter": "encoder_hidden_states",
        "kind": "text",
    }
