"""The whole chain runs, from pictures to an evaluated pipeline, and goes on when stopped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from training import captions, checkpoint, loop, pictures, train, vocabulary
from training.evaluate import Sampler, evaluate
from training.export import export
from training.pictures import Dataset, Row
from training.settings import Settings, override

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "gold": (230, 180, 0),
}
SMALL = [
    "model.picture=32", "model.latent_channels=4", "model.vae_channels=[8,16,16]",
    "model.heads=2", "model.head_dim=16", "model.dual_blocks=1", "model.single_blocks=1",
    "model.text_dim=32", "model.text_head_dim=16", "vae.batch=4", "flow.batch=8",
    "flow.long_every=3", "held_out=0.1",
]  # fmt: skip


def draw() -> Dataset:
    """Eight shapes in three styles: filled, outlined and shaded, on white."""
    rows, drawn = [], []
    y, x = np.mgrid[0:32, 0:32]
    for number, (colour, rgb) in enumerate(COLOURS.items()):
        for shape in ("disc", "box"):
            across, down = abs(x - 16), abs(y - 16)
            distance = np.hypot(across, down) if shape == "disc" else np.maximum(across, down)
            for style in ("noto", "3d", "flat"):
                inside = (distance < 11) & ((distance > 7) | (style != "noto"))
                light = 1 - 0.5 * (y / 32) if style == "3d" else np.ones((32, 32))
                image = np.where(inside[..., None], np.array(rgb) * light[..., None], 255)
                drawn.append(image.astype(np.uint8))
                name, code = f"{colour} {shape}", f"{number}{shape}"
                rows.append(Row(name, style, "symbol", ("shape", colour), code))
    source = {"author": "the test", "licence": "MIT", "package": "none", "version": "0",
              "notice": "emojibase.txt"}  # fmt: skip
    return Dataset(np.stack(drawn), tuple(rows), {"captions": source})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, tokenizers and one whole training run."""
    root = tmp_path_factory.mktemp("chain")
    dataset = draw()
    pictures.save(root / "data", dataset)
    texts = [text for texts in captions.all_captions(dataset.rows) for text in texts]
    vocabulary.build([*texts, vocabulary.PROMPT_WORDS], root / "tokenizers", 560)
    assert train.main([*arguments(root, "run"), "--flow-steps", "6", "--worker"]) == 0
    return root


def arguments(root: Path, out: str) -> list[str]:
    return [
        "--data", str(root / "data"), "--tokenizers", str(root / "tokenizers"), "--device", "cpu",
        "--out", str(root / out), "--vae-steps", "3", "--set", *SMALL,
    ]  # fmt: skip


def test_a_stopped_run_goes_on_bit_by_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    plain_step = loop.plain_step
    taken = []

    def stopping(*args):
        taken.append(0)
        if len(taken) == 6:  # three steps of the VAE, two of the flow, then
            raise KeyboardInterrupt
        return plain_step(*args)

    monkeypatch.setattr(loop, "plain_step", stopping)
    command = [*arguments(folder, "stopped"), "--flow-steps", "6", "--worker"]
    with pytest.raises(KeyboardInterrupt):
        train.main(command)
    assert train.main(command) == 0
    assert len(taken) == 6 + 4
    settings = override(Settings(), SMALL)
    for name in ("vae.safetensors", "flow.safetensors"):
        whole, _ = checkpoint.load(folder / "run" / name, settings)
        stopped, progress = checkpoint.load(folder / "stopped" / name, settings)
        assert progress.done
        assert all(torch.equal(whole[key], stopped[key]) for key in whole)
    with pytest.raises(ValueError, match="another --out"):
        checkpoint.load(folder / "run" / "flow.safetensors", Settings())


def test_export_loads_makes_a_picture_and_is_evaluated(folder: Path) -> None:
    from diffusers import FluxPipeline

    model = folder / "model"
    assert export(folder / "run" / "weights", folder / "tokenizers", model) < 2**20
    pipe = FluxPipeline.from_pretrained(model)
    defaults = json.loads((model / "samovar.json").read_text())
    image = pipe("Red disc, FLAT style", **{**defaults, "num_inference_steps": 2}).images[0]
    assert image.size == (32, 32)
    assert "the test" in (model / "NOTICE").read_text()
    dataset = pictures.load(folder / "data")
    held_out = captions.held_out(dataset.rows, 0.1)
    assert held_out
    sampler = Sampler(model, "cpu", 8)
    sampler.defaults["num_inference_steps"] = 2
    out = folder / "evaluation"
    result = evaluate(sampler, dataset, 4, [(2, 3.0), (3, 1.0)], out, held_out)
    assert [r["cases"] for r in result["recall"]] == [4, 4]
    assert result["held_out"]["style_of_own_real"] == 1.0
    assert 0 <= result["held_out"]["style"] <= 1
    assert "judge of palette and texture" in (out / "evaluation.md").read_text()
    names = {path.name for path in out.iterdir()}
    assert {"evaluation.json", "evaluation.md", "sheet_new.png", "sheet_training.png"} <= names
    # the batch is what the pipeline makes one by one
    alone = pipe(
        captions.caption(dataset.rows[0]), generator=torch.Generator().manual_seed(10_000),
        output_type="pt", **{**defaults, "num_inference_steps": 2},
    ).images  # fmt: skip
    both = sampler([captions.caption(dataset.rows[0]), "x"])
    torch.testing.assert_close(both[:1], alone.float(), rtol=0, atol=1e-3)


def test_a_run_can_start_from_weights_alone(folder: Path) -> None:
    weights = folder / "run" / "weights"
    command = [*arguments(folder, "again"), "--worker", "--init", str(weights)]
    assert train.main([*command, "--flow-steps", "1"]) == 0
    before, about = checkpoint.read_weights(weights)
    after, again = checkpoint.read_weights(folder / "again" / "weights")
    assert about["scaling"] == again["scaling"]
    assert all(torch.allclose(before[name], after[name], atol=1e-2) for name in before)
    assert not all(torch.equal(before[name], after[name]) for name in before)
