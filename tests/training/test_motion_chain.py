"""Clips, captions, training and export of the video model fit together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training import loop, pictures, vocabulary
from training.motion import stages, train
from training.motion.clips import FRAMES, KINDS, SIDE, all_captions, caption, draw
from training.motion.export import export, pack
from training.motion.settings import TINY
from training.pictures import Dataset, Row

SOURCE = {"author": "the test", "licence": "MIT", "package": "none", "version": "0", "notice": "emojibase.txt"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two emoji, a red arrow to the right and a blue bar, and a tokenizer of their captions."""
    folder = tmp_path_factory.mktemp("motion")
    drawn = np.full((2, 128, 128, 3), 255, np.uint8)
    for x in range(20, 108):
        drawn[0, x // 2 + 10 : 118 - x // 2, x] = (220, 20, 20)
    drawn[1, 50:78, 10:118] = (20, 20, 220)
    rows = tuple(Row(name, "flat", "symbol", (), name) for name in ("arrow", "bar"))
    pictures.save(folder, Dataset(drawn, rows, {"words": SOURCE}))
    texts = [text for some in all_captions(rows) for text in some]
    vocabulary.build_t5([*texts, vocabulary.PROMPT_WORDS], 256, folder / "tokenizer")
    return folder


def clips(data: Path, kind: str) -> np.ndarray:
    """How dark the arrow's clip is: (frames, rows, columns)."""
    arrow = torch.from_numpy(pictures.load(data).pictures[:1].copy())
    return (1 - draw(arrow, torch.tensor([KINDS.index(kind)]), torch.Generator().manual_seed(0)))[0].sum(0).numpy()


def centre(frame: np.ndarray, axis: int) -> float:
    weight = frame.sum(1 - axis)
    return float((weight * np.arange(len(weight))).sum() / weight.sum())


@pytest.mark.parametrize(("kind", "axis", "sign"), [("up", 0, -1), ("down", 0, 1), ("left", 1, -1), ("right", 1, 1)])
def test_a_clip_moves_where_it_is_said_to(data: Path, kind: str, axis: int, sign: int) -> None:
    clip = clips(data, kind)
    assert clip.shape == (FRAMES, SIDE, SIDE)
    places = [centre(frame, axis) for frame in clip]
    assert np.all(sign * np.diff(places) > 0.5)
    assert abs(centre(clip[0], 1 - axis) - centre(clip[-1], 1 - axis)) < 0.5


def test_a_clip_turns_grows_and_fades_as_it_is_said_to(data: Path) -> None:
    # The arrow's broad end is at the left; a quarter of a turn clockwise brings it to the top.
    for kind, sign in (("clockwise", -1), ("counterclockwise", 1)):
        widths = (clips(data, kind)[FRAMES // 2] > 0.5).sum(1)
        first, last = np.flatnonzero(widths)[[0, -1]]
        assert sign * (int(widths.argmax()) - (first + last) / 2) > 5
    ink = {kind: clips(data, kind).sum((1, 2)) for kind in ("growing", "shrinking", "fading in", "fading out", "still")}
    assert ink["growing"][-1] > 3 * ink["growing"][0]
    assert ink["shrinking"][0] > 3 * ink["shrinking"][-1]
    assert ink["fading in"][0] == 0 < ink["fading in"][-1]
    assert ink["fading out"][-1] == 0 < ink["fading out"][0]
    assert np.allclose(ink["still"], ink["still"][0])


def test_a_caption_leads_to_its_clip(data: Path, tmp_path: Path) -> None:
    """Two cases with latents of their own; after training, the exported pipeline gives each caption's."""
    from diffusers import WanPipeline

    options = SimpleNamespace(seconds=60.0, out=tmp_path, work=None, mode="eager", tiny=True, names=None, data=data,
                              start=None, vae_share=None)  # fmt: skip
    run = train.Run(options)  # type: ignore[arg-type]
    run.config = replace(TINY, flow_batch=12, blocks=1, lr=4e-3, muon_lr=8e-3, warmup=10, ema=0.9)
    vae = stages.ClipVae(run.config, run.pictures)
    assert stages.bank(vae.averaged(), run.pictures, run.config, math.inf).shape == (1, 24, 5 * 64, 8)
    pattern = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1])
    true = torch.stack([pattern, -pattern])[:, None] + 0.1 * torch.randn(2, 5 * 64, 8)
    cases = [KINDS.index("up"), len(KINDS) + KINDS.index("growing")]
    stage = train.flow_stage(run, true[None])
    stage.of_case = stage.of_case[cases]
    loop.run(stage, loop.Budget(steps=60), tmp_path / "flow", run.config, "eager", math.inf, lambda line: None)
    weights = {name: value.detach().clone() for name, value in vae.parameters.items()}
    scale = (stage.mean, stage.std)
    export(tmp_path / "motion", run.config, weights, stage.averaged(), scale, run.tokenizer, run.sources)
    assert [part.name for part in pack(tmp_path / "motion", tmp_path)] == ["model.tar.0"]
    pipe = WanPipeline.from_pretrained(tmp_path / "motion")
    pipe.set_progress_bar_config(disable=True)
    true = ((true - stage.mean) / stage.std).mT.unflatten(2, (5, 8, 8))
    for case, row, kind in ((0, run.rows[0], "up"), (1, run.rows[1], "growing")):
        generator = torch.Generator().manual_seed(1)
        found = pipe(
            caption(row, kind), height=SIDE, width=SIDE, num_frames=FRAMES, num_inference_steps=8, guidance_scale=2.0,
            max_sequence_length=32, generator=generator, output_type="latent",
        ).frames  # fmt: skip
        errors = (found - true).square().mean((1, 2, 3, 4))
        assert errors[case] < 0.3 * errors[1 - case]
