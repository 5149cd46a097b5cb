"""What components need beside their weights is counted, and what is counted is what a real run takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar.arch.skeleton import read_skeleton
from samovar.builtin import BUILTIN_MODELS
from samovar.trace.activations import activations_of, read_activations
from samovar.trace.dry_run import RequestSize, dry_run

MIB = 2**20


def allocated(run: Any) -> int:
    """The most bytes that the CPU's allocator holds beyond what it held before, as torch's profiler sees it."""
    with (
        torch.no_grad(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("name", ["flux", "qwen-image", "sd3", "wan", "ltx"])
def test_the_count_is_what_a_real_forward_takes(name: str) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    frames = tiny.settings.get("num_frames")
    size = RequestSize(128, 192, frames)
    if name == "wan":
        size = RequestSize(64, 96, frames)
    if name == "sd3":
        size = RequestSize(16, 24)
    seen = dry_run(pipe, size)
    call = seen.calls["transformer"]

    def real(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor

    from samovar.core import nested

    args, kwargs = nested.map_tensors(real, (tuple(call.args), dict(call.kwargs)))
    measured = allocated(lambda: pipe.transformer(*args, **kwargs))
    given = sum(tensor.nbytes for tensor in nested.tensors((args, kwargs)))
    # The count has what the pipeline holds besides: arguments, latents, prompts of both branches.
    assert measured * 0.8 <= seen.peaks["transformer"] <= measured * 1.25 + 4 * given


def test_a_margin_is_added_and_the_size_is_named() -> None:
    pipe = PIPELINES["flux"].build(0)
    size = RequestSize(16, 24, batch=2)
    counted, known = dry_run(pipe, size).peaks, activations_of(pipe, size)
    assert known.by_name == {name: int(peak * 1.1) + 256 * MIB for name, peak in counted.items()}
    assert known.note == "activations are those of 24 x 16 pixels, a batch of 2, and 10% and 256 MiB to spare"
    assert known.problem is None


def test_a_second_denoiser_that_did_not_run_needs_what_the_first_does() -> None:
    pipe = PIPELINES["wan"].build(0)
    pipe.register_to_config(boundary_ratio=0.0)
    size = RequestSize(32, 48, 9)
    assert "transformer_2" not in dry_run(pipe, size).peaks
    known = activations_of(pipe, size)
    assert known.by_name["transformer_2"] == known.by_name["transformer"]
    assert known.problem is None


def test_a_lone_model_is_estimated_and_the_note_says_so() -> None:
    known = activations_of(PIPELINES["flux"].build(0).transformer, RequestSize(64, 64))
    assert {*known.by_name} == {"transformer"}
    assert "estimated for 64 x 64 pixels of a FluxTransformer2DModel as it is configured" in known.note
    larger = activations_of(PIPELINES["flux"].build(0).transformer, RequestSize(128, 64, batch=3))
    assert larger.by_name["transformer"] > known.by_name["transformer"]


def test_the_estimate_of_flux_is_near_what_was_measured() -> None:
    _, parts = read_skeleton("FluxTransformer2DModel")
    known = read_activations("FluxTransformer2DModel", parts)
    assert "1024 x 1024 pixels" in known.note
    counted = known.by_name["transformer"] - 256 * MIB
    assert 0.35 < counted / 2**30 < 0.6, "measured: 0.35 to 0.6 GiB"


def test_a_folder_without_its_tokenizers_is_estimated_model_by_model(tmp_path: Any) -> None:
    import shutil

    folder = tmp_path / "emoji"
    shutil.copytree(BUILTIN_MODELS["emoji"], folder, ignore=shutil.ignore_patterns("tokenizer*"))
    known = read_activations(str(folder), read_skeleton(str(folder))[1], RequestSize(128, 128))
    assert {*known.by_name} == {"transformer"}
    assert known.problem is not None
    assert re.search(r"The CLIPTokenizer in .*tokenizer cannot be \w+: ", known.problem)
