"""Plans that are derived: what is found in a block, and how many classes of diffusers run by one."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import zoo
from samovar.arch import find_anatomy
from samovar.errors import ModelError
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelPartialInput,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
)
from samovar.parallel.derive import split_stack
from samovar.trace.watch import Watcher

from .conftest import Count, OnRanks

LEAST_CLASSES, LEAST_WHOLE = 76, 66
"""Of diffusers' transformer classes that run sharded by a derived plan, and of those whose blocks are split as a whole
and not around the modules in them. May only grow."""
CASES = {case.id: case for case in zoo.load()}


def split(name: str, stack: str, size: int = 2) -> Any:
    case = CASES[name]
    model = case.build()
    anatomy = find_anatomy(model)
    watched = Watcher(model, anatomy, keeps_calls=True)
    with watched.watching():
        case.run(model)
    return split_stack(model, anatomy.stack(stack), watched, size)


def test_tokens_and_tables() -> None:
    wan = split("WanTransformer3DModel", "blocks")
    assert (wan.stream, wan.dim, wan.outputs) == ("hidden_states", 1, (0,))
    assert wan.tables == {"rotary_emb": [SequenceParallelInput(1)] * 2}
    assert (wan.first, wan.last, wan.length) == ("blocks.0", "blocks.2", 60)


def test_tables_of_text_and_image() -> None:
    for name in ("FluxTransformer2DModel", "FluxTransformer2DModel-equal-lengths"):
        flux = split(name, "transformer_blocks")
        both = SequenceParallelPartialInput(0, "encoder_hidden_states")
        assert (flux.stream, flux.outputs, flux.num_outputs) == ("hidden_states", (1,), 2)
        assert flux.tables == {"image_rotary_emb": [both, both]}


def test_the_sequence_need_not_be_the_second_dimension() -> None:
    assert split("ErnieImageTransformer2DModel", "layers").dim == 0


def test_the_plan_of_a_stack() -> None:
    once = split("WanTransformer3DModel", "blocks").plan(each_block=False)
    assert list(once) == ["blocks.0", "blocks.*", "blocks.2"]
    each = split("WanTransformer3DModel", "blocks").plan(each_block=True)
    assert list(each) == ["blocks.*", "blocks.0", "blocks.1", "blocks.2"]
    assert list(each["blocks.*"]) == ["hidden_states", "rotary_emb"]


def test_blocks_that_mix_tokens_otherwise_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'transformer_blocks' cannot be split.*SanaTransformerBlock"):
        split("SanaTransformer2DModel", "transformer_blocks")
    with pytest.raises(ModelError, match="a dimension of at least 99"):
        split("WanTransformer3DModel", "blocks", size=99)


def test_watching_leaves_nothing_behind() -> None:
    model = CASES["WanTransformer3DModel"].build()
    with Watcher(model, find_anatomy(model)).watching(), contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def apart(one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor):
        return float((one - other).abs().max()) if one.shape == other.shape else float("inf")
    return max(map(apart, one, other), default=0.0) if isinstance(one, (list, tuple)) else 0.0


def survey(names: list[str]) -> dict[str, Any]:
    """Each case by a derived plan and no model code: its greatest error, or why it was refused."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        model = CASES[name].build()
        vars(model)["_cp_plan"] = None
        bare = CASES[name].run(model), CASES[name].run(model, step=1)
        try:
            sharding = enable_sequence_parallel_for_model(
                model, SequenceParallelConfig(ulysses_degree=2), strategy="auto"
            )
            assert sharding is not None
            error = max(apart(CASES[name].run(model, step), bare[step]) for step in range(2))
            found[name] = error, sharding.source
            disable_sequence_parallel_for_model(model)
            assert zoo.equal(CASES[name].run(model), bare[0]), name
        except ValueError as error:
            found[name] = None, str(error)
    return found


def test_how_many_classes_run_by_a_derived_plan(on_ranks: OnRanks, record_property: Count) -> None:
    """One case of each class; all cases in the slow tests."""
    plain = {case.model: name for name, case in reversed(CASES.items())}
    record_property("count", check(on_ranks, list(plain.values())))


@pytest.mark.slow
def test_how_many_cases_run_by_a_derived_plan(on_ranks: OnRanks, record_property: Count) -> None:
    record_property("count", check(on_ranks, list(CASES)))


def check(on_ranks: OnRanks, names: list[str]) -> str:
    """Asserts that enough classes run, and that what runs is right; how many do, in a line."""
    names = [name for name in names if CASES[name].model in zoo.exported_classes()]
    found = on_ranks(2, survey, names)[0]
    sources = {CASES[name].model: source for name, (error, source) in reversed(found.items()) if error is not None}
    derived = {model for model, source in sources.items() if source.startswith("derived ")}
    inside = {model for model in derived if sources[model].startswith("derived inside")}
    wrong = {name: error for name, (error, _) in found.items() if error is not None and not error <= 1e-5}
    assert wrong == {}, "what runs is right; what is not right is refused"
    classes = {CASES[name].model for name in names}
    missing = len({case.model for case in CASES.values()} - zoo.exported_classes())  # in an older diffusers
    assert len(derived) >= LEAST_CLASSES - missing
    assert len(derived - inside) >= LEAST_WHOLE - missing
    return (
        f"parallel: {len(derived)} of {len(classes)} transformer classes run by a derived plan, {len(inside)} of them "
        f"split inside their blocks: {', '.join(sorted(inside))}; attention only: "
        f"{', '.join(sorted(set(sources) - derived)) or 'none'}; not at all: "
        f"{', '.join(sorted(classes - set(sources))) or 'none'}"
    )
