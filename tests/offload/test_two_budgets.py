"""Both budgets on real pipelines that were saved and loaded again: the same bits from every tier and mixture."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from safetensors.torch import load_file

import zoo
from pipelines import tiny_flux_pipeline
from samovar import attach
from samovar.core.errors import ModelError, SettingError
from samovar.hooks import running
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload

from .holding import CASES, Holder
from .test_offload import draw

LEAST = 4 * 4096
"""Room for three buffers and for a few buffers of the text encoders, which are in no file."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flux")
    tiny_flux_pipeline().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.offload.layout.MIN_PIECE", 600)
    monkeypatch.setattr("samovar.offload.coding.TILE", 32)


def loaded(folder: Path) -> Any:
    pipe = FluxPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def offload(pipe: Any, *, lazy: bool = True, mode: Any = "layerwise", **config: Any) -> Offloaded:
    return apply_offload(pipe, OffloadConfig(mode, **config), stage=HostStage(lazy=lazy))


def tiers_of(offloaded: Offloaded) -> set[str]:
    return set(offloaded.tiers.tiers.values())


@pytest.mark.parametrize("mode", ["layerwise", "model"])
@pytest.mark.parametrize("lazy", [False, True])
def test_the_same_bits_from_pinned_memory_from_disk_and_from_both(folder: Path, mode: str, lazy: bool) -> None:
    pipe = loaded(folder)
    expected = draw(pipe)
    places = [p.data_ptr() for p in pipe.transformer.parameters()]
    whole = sum(p.numel() * p.element_size() for p in pipe.transformer.parameters())
    seen = []
    for budget in (LEAST, 2 * whole // 3, None):
        offloaded = offload(pipe, lazy=lazy, mode=mode, host_memory=budget)
        for _ in range(2):
            assert torch.equal(draw(pipe), expected)
        seen.append(tiers_of(offloaded))
        assert (budget is None) or offloaded.tiers.held_bytes <= budget
        offloaded.detach()
        assert places == [p.data_ptr() for p in pipe.transformer.parameters()] or budget != LEAST
        assert torch.equal(draw(pipe), expected)
    assert seen == [{"disk"}, {"pinned", "disk"}, {"pinned"}]


@pytest.mark.parametrize("tier", ["pinned", "disk"])
def test_weights_that_are_written_to_count_and_the_file_does_not(folder: Path, tier: str) -> None:
    pipe, reference = loaded(folder), loaded(folder)
    offloaded = offload(pipe, host_memory=None if tier == "pinned" else LEAST)
    assert tiers_of(offloaded) == {tier}
    before = draw(pipe)
    for model in (pipe, reference):
        block = model.transformer.transformer_blocks[0]
        block.attn.to_q.weight.data.mul_(1.5)  # As peft merges an adapter: torch does not count it.
        with torch.no_grad():
            block.attn.to_k.bias.add_(0.25)
        model.transformer.proj_out.weight.data[0] = 3.0
    expected = draw(reference)
    assert not torch.equal(before, expected)
    for _ in range(2):
        assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)
    assert torch.equal(draw(loaded(folder)), before), "the file is as it was"


def test_a_cache_beside_both_budgets_gives_the_bits_of_the_cache_alone(folder: Path) -> None:
    pipe = loaded(folder)
    call = {"num_inference_steps": 6, "height": 16, "width": 16, "max_sequence_length": 8, "output_type": "pt"}

    def run() -> torch.Tensor:
        image: torch.Tensor = pipe("a cat", generator=torch.Generator().manual_seed(0), return_dict=False, **call)[0]
        return image

    known = {"backend": "tea_cache", "rel_l1_thresh": 0.9}
    with attach(pipe, known):
        expected = run()
    with attach(pipe, known, offload={"mode": "layerwise", "device": "cpu"}, host_memory=LEAST) as attached:
        assert torch.equal(run(), expected)
        assert "in its file on disk, sent in every forward" in str(attached.explain())


def test_weights_in_no_file_are_refused(folder: Path) -> None:
    pipe = loaded(folder)
    pipe.transformer.to(torch.float64).to(torch.float32)  # Now they are in memory alone.
    expected = draw(pipe)
    places = [p.data_ptr() for p in pipe.transformer.parameters()]
    with pytest.raises(SettingError, match=r"host_memory=16.00 KiB is not enough.*in no file.*dtype of its files"):
        offload(pipe, host_memory=LEAST)
    assert places == [p.data_ptr() for p in pipe.transformer.parameters()]
    assert torch.equal(draw(pipe), expected)


@pytest.mark.parametrize("tier", ["pinned", "disk"])
def test_a_file_that_is_deleted_or_replaced_is_still_the_one_that_was_loaded(
    folder: Path, tmp_path: Path, tier: str
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    pipe = loaded(tmp_path / "model")
    expected = draw(pipe)
    budget = None if tier == "pinned" else LEAST
    offloaded = offload(pipe, host_memory=budget)
    weights = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    assert torch.equal(draw(pipe), expected)
    weights.write_bytes(bytes(len(content)))
    assert torch.equal(draw(pipe), expected)
    weights.with_name(weights.name + " (deleted)").write_bytes(bytes(len(content)))  # As the kernel calls the old one.
    offloaded.detach()
    offloaded = offload(pipe)  # Its name leads to another file now.
    assert torch.equal(draw(pipe), expected)
    offloaded.detach()


@pytest.mark.parametrize("damage", ["changed", "truncated"])
def test_a_file_that_changes_while_it_is_in_use_is_refused(folder: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(folder, tmp_path / "model")
    pipe = loaded(tmp_path / "model")
    offloaded = offload(pipe, host_memory=LEAST)
    draw(pipe)
    weights = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors"
    with weights.open("r+b") as file:
        if damage == "truncated":
            file.truncate(4096)
        else:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
    with pytest.raises(ModelError, match=rf"diffusion_pytorch_model.safetensors was {damage} while.*load the pipeline"):
        draw(pipe)
    with pytest.raises(ModelError, match=damage):
        draw(pipe)
    offloaded.detach()


def test_every_class_of_the_zoo_streams_from_its_file(tmp_path: Path) -> None:
    for name in ("SD3Transformer2DModel", "HunyuanVideoTransformer3DModel", "WanTransformer3DModel"):
        case = CASES[name]
        case.build().save_pretrained(tmp_path / name)
        model = type(case.build()).from_pretrained(tmp_path / name).eval()
        expected = [case.run(model, step) for step in range(3)]
        holder = Holder(transformer=model)
        offloaded = offload(holder, host_memory=8 * 4096)
        assert "disk" in tiers_of(offloaded)
        with running(holder):
            for step in range(3):
                assert zoo.equal(case.run(model, step), expected[step])
        offloaded.detach()


def test_a_new_plan_moves_weights_between_tiers(folder: Path) -> None:
    pipe = loaded(folder)
    expected = draw(pipe)
    offloaded = offload(pipe, host_memory=LEAST)
    assert tiers_of(offloaded) == {"disk"}
    for budget, tiers in ((2**20, {"pinned"}), (LEAST, None), (None, {"pinned"})):
        if tiers is None:
            with pytest.raises(SettingError, match="in memory and in no file"):
                offloaded.replan(host_memory=budget)
        else:
            offloaded.replan(host_memory=budget)
            assert tiers_of(offloaded) == tiers
        assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    assert not offloaded.stage.registered  # type: ignore[attr-defined]


def test_compressed_plain_and_on_disk_beside_each_other(folder: Path, tmp_path: Path) -> None:
    """Blocks that stay in memory cross compressed, others are read from their file, in one ring."""
    pipe = loaded(folder).to(torch.bfloat16)
    pipe.transformer.save_pretrained(tmp_path)
    pipe.transformer.load_state_dict(load_file(tmp_path / "diffusion_pytorch_model.safetensors"), assign=True)
    expected = draw(pipe)
    whole = sum(p.numel() * p.element_size() for p in pipe.transformer.parameters())
    for compress in ("lossless", "none"):
        how = {"compress": compress, "exclude": ("text_encoder", "text_encoder_2", "vae")}
        offloaded = offload(pipe, host_memory=3 * whole // 4, **how)
        assert tiers_of(offloaded) == {"pinned", "disk"}
        for _ in range(2):
            assert torch.equal(draw(pipe), expected)
        stats = offloaded.stats()
        assert (stats.coded_bytes > 0) == (compress == "lossless")
        offloaded.detach()
        assert torch.equal(draw(pipe), expected)
