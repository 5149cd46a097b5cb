"""What is attached where, in which order, and why: read off the pipeline."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar import attach
from samovar.compose import Explanation
from samovar.compose.explain import Place
from samovar.hooks import HookRegistry

ALL: dict[str, Any] = {
    "cache": {"backend": "tea_cache", "schedule": "#.#."}, "offload": {"mode": "layerwise", "device": "cpu"},
    "compile": "eager",
}  # fmt: skip


@pytest.fixture(scope="module")
def explained() -> Explanation:
    pipe = PIPELINES["flux"].build(0)
    with attach(pipe, **ALL) as attached:
        explanation = attached.explain()
        assert HookRegistry.get_or_create(pipe.transformer).chain  # What is told is still there.
    return explanation


def place_of(explanation: Explanation, path: str) -> Place:
    return next(place for place in explanation.places if path in place.where)


def test_where_and_in_which_order(explained: Explanation) -> None:
    assert place_of(explained, "transformer").chain == (
        "branches (outermost)", "samovar_offload_entry (outermost)", "teacache (cache)", "samovar_offload (offload)"
    )  # fmt: skip
    blocks = place_of(explained, "transformer.transformer_blocks.*")
    assert blocks.chain == ("teacache (cache)", "samovar_offload (offload)", "compiled")
    assert blocks.where == ("transformer.transformer_blocks.*", "transformer.single_transformer_blocks.*")
    assert blocks.num_modules == 5
    assert place_of(explained, "each run of the pipeline").chain == ("teacache", "samovar_offload")
    assert [line.partition(":")[0] for line in explained.order] == ["outermost", "cache", "offload"]


def test_what_and_why(explained: Explanation) -> None:
    assert [feature.name for feature in explained.features] == ["cache", "compile", "offload"]
    cache, compiled, offload = explained.features
    assert cache.why == "skips the steps of its schedule"
    assert re.search(r"transformer: blocks hold \d+\.\d % of the weights; outside: \w+ \d+\.\d %", cache.settings)
    assert "5 blocks (FluxSingleTransformerBlock, FluxTransformerBlock) by eager" in compiled.settings
    assert offload.settings.startswith("layerwise, computing on cpu\n")
    assert "50% of the forwards are skipped and load nothing" in offload.settings


def test_it_is_text_and_data(explained: Explanation) -> None:
    text = str(explained)
    assert text.startswith("FluxPipeline:\n  cache: TeaCache schedule=#.#.\n    transformer: blocks hold")
    assert "\n    skips the steps of its schedule\n  compile: 5 blocks" in text
    assert "\n  teacache (cache) > samovar_offload (offload) > compiled\n    transformer.transformer_blocks.*, " in text
    assert max(map(len, text.partition("outermost first")[2].splitlines())) < 130
    assert json.loads(json.dumps(explained.to_dict()))["pipeline"] == "FluxPipeline"


def test_nothing_and_a_lone_model() -> None:
    assert str(attach(torch.nn.Linear(1, 1)).explain()) == "Linear: nothing is attached."
    model = PIPELINES["sd3"].build(0).transformer
    with attach(model, "tea_cache") as attached:
        explained = attached.explain()
        assert explained.pipeline == "SD3Transformer2DModel"
        assert place_of(explained, "transformer.transformer_blocks.*").chain == ("teacache (cache)",)
    assert attached.explain().places == (), "off is off"


def test_peers_are_told() -> None:
    pipe = PIPELINES["flux"].build(0)
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    with attach(pipe, "tea_cache") as attached:
        names = [feature.name for feature in attached.explain().features]
    assert names == ["cache", "diffusers' layerwise_casting"]


def test_auto_is_no_teacache_and_touches_no_block() -> None:
    pipe = PIPELINES["flux"].build(0)
    with attach(pipe, cache="auto", offload={"mode": "layerwise", "device": "cpu"}) as attached:
        text = str(attached.explain())
    assert "cache: auto tolerance=high\n    leaves out whole forwards" in text
