"""Plans as dictionaries: which are valid, where they act, and where they come from."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import zoo
from samovar.core.errors import SettingError
from samovar.parallel import SequenceParallelInput, SequenceParallelOutput, SequenceParallelPartialInput
from samovar.parallel.plan import declared_plan, place_plan, read_plan

SPLIT, GATHER = SequenceParallelInput(split_dim=1, expected_dims=3), SequenceParallelOutput(gather_dim=1)
RETURNED = SequenceParallelInput(split_dim=0, split_output=True)


@functools.cache
def model(name: str) -> torch.nn.Module:
    return next(case for case in zoo.load() if case.id == name).build()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({}, "at least one entry"),
        ([], "A plan is a dictionary"),
        ({"a.*.b.*": {"x": SPLIT}}, "at most one"),
        ({0: {"x": SPLIT}}, "keys of a plan are module paths"),
        ({"": {"x": 3}}, "has 3 for 'x' of ''"),
        ({"": {"x": [SPLIT, 3]}}, "has 3 for 'x'"),
        (
            {"": {0: SPLIT}},
            "for 0 of ''. What splits an output has split_output=True, and the output's index as its key",
        ),
        ({"": {"x": RETURNED}}, "for 'x' of ''. What splits an output has"),
        ({"": {1.5: SPLIT}}, "has the key 1.5"),
        ({"": SPLIT}, "expected a dictionary of inputs, a SequenceParallelOutput"),
        ({"": GATHER}, "splits nothing"),
        ({"": {}}, "splits nothing"),
    ],
)
def test_invalid_plans(plan: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        read_plan(plan)
    assert caught.value.param == "plan"


def test_paths_and_stars() -> None:
    flux = model("FluxTransformer2DModel")
    placements = place_plan(
        flux,
        {
            "": {"hidden_states": SPLIT},
            "transformer_blocks.*": {"image_rotary_emb": [SPLIT, None]},
            "transformer_blocks.*.attn": [GATHER, None],
            "pos_embed": {0: RETURNED},
            "proj_out": GATHER,
        },
    )
    paths = " transformer_blocks.0 transformer_blocks.1 transformer_blocks.0.attn transformer_blocks.1.attn pos_embed"
    assert [placement.path for placement in placements] == [*paths.split(" "), "proj_out"]
    assert (placements[3].gathers, placements[3].outputs) == (True, {0: GATHER, 1: None})
    assert (placements[5].gathers, placements[5].outputs) == (False, {0: RETURNED})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"proj_uot": GATHER, "": {"hidden_states": SPLIT}}, "'proj_uot'.*Did you mean 'proj_out'"),
        (
            {"blocks.*": {"hidden_states": SPLIT}},
            r"names 'blocks\.\*', but Flux\w+ has no such module. Did you mean '(single_)?transformer_blocks\.\*'",
        ),
        ({"norm_out.*": {"hidden_states": SPLIT}}, "names 'norm_out\\.\\*', but Flux"),
        ({"transformer_blocks.*.nothing": {"x": SPLIT}}, "names 'transformer_blocks.*.nothing'"),
        ({"": {"hiden_states": SPLIT}}, "parameter 'hiden_states'.*Did you mean 'hidden_states'"),
        ({"": {"img_ids": SequenceParallelPartialInput(0, "text_ids")}}, "parameter 'text_ids'.*'txt_ids'"),
    ],
)
def test_what_is_not_there_is_refused_by_name(plan: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        place_plan(model("FluxTransformer2DModel"), plan)


def test_plans_that_models_come_with() -> None:
    flux = model("FluxTransformer2DModel")
    source, plan = declared_plan(flux) or ("", {})
    assert source == "_cp_plan"
    assert plan["proj_out"] == SequenceParallelOutput(gather_dim=1, expected_dims=3)
    assert plan[""]["img_ids"] == SequenceParallelInput(split_dim=0, expected_dims=2, is_optional=True)
    bare = torch.nn.Linear(1, 1)
    vars(bare)["_sp_plan"] = {"": {"input": SPLIT}}
    assert declared_plan(bare) == ("_sp_plan", {"": {"input": SPLIT}})
    assert declared_plan(model("SD3Transformer2DModel")) is None
