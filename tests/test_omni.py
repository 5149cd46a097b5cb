"""The Python API."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from pipelines import tiny_flux_pipeline
from samovar import Omni, OmniDiffusionSamplingParams
from samovar.errors import SettingError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return path


SETTINGS = {"height": 16, "width": 16, "num_inference_steps": 1, "max_sequence_length": 8}


def test_a_list_gives_a_list_in_order_and_overrides_win(folder: Path) -> None:
    params = OmniDiffusionSamplingParams(**SETTINGS, seed=3)
    with Omni(str(folder), progress=False) as omni:
        both = omni.generate(["a cat", "a dog"], params)
        assert [result.prompt for result in both] == ["a cat", "a dog"]
        alone = omni.generate("a dog", params)[0]
        assert np.array_equal(np.asarray(both[1].images[0]), np.asarray(alone.images[0]))
        assert omni.generate("a dog", params, seed=9)[0].seeds == (9,)
        with pytest.raises(SettingError, match="Did you mean 'height'"):
            omni.generate("a dog", hieght=16)
        assert omni.generate("a dog", params)[0].seeds == (3,), "usable after an error"
    with pytest.raises(SettingError, match="This Omni is closed"):
        omni.generate("a dog")


def test_two_ranks_make_the_same_picture_and_end_with_it(folder: Path) -> None:
    settings = SETTINGS | {"width": 24, "num_inference_steps": 3, "seed": 3}
    others = set(multiprocessing.active_children())  # Of tests that keep their ranks for more than one test.
    with Omni(str(folder), device="cpu", progress=False) as omni:
        alone = np.asarray(omni.generate("a cat", **settings)[0].images[0]).astype(float)
    with Omni(str(folder), device="cpu", progress=False, ulysses_degree=2) as omni:
        first, second = omni.generate(["a cat", "a dog"], **settings)
        processes = set(multiprocessing.active_children()) - others
        assert len(processes) == 2
    assert np.abs(np.asarray(first.images[0]) - alone).max() / 255 <= 1e-3
    assert not np.array_equal(np.asarray(first.images[0]), np.asarray(second.images[0]))
    assert not any(process.is_alive() for process in processes)
    assert set(multiprocessing.active_children()) <= others


def test_a_bad_setting_is_refused_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object) -> None:
        raise AssertionError("must be refused before")

    monkeypatch.setattr("samovar.engine.worker._load_pipeline", loaded)
    monkeypatch.setattr("samovar.parallel.Ranks.__init__", loaded)
    for settings, message in (
        ({"ulysses_degree": 0}, "ulysses_degree is 0; a number of ranks from 1 on was expected"),
        ({"cfg_parallel_size": 2, "cache_backend": "tee_cache"}, "Did you mean 'tea_cache'"),
        ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, "exclude each other"),
        ({"gpu_memory": "lots"}, "gpu_memory is 'lots'"),
    ):
        with pytest.raises(SettingError, match=message):
            Omni(str(folder), device="cpu", **settings)


def test_offload_gives_the_same_picture(folder: Path) -> None:
    pictures = []
    for settings in ({}, {"enable_cpu_offload": True}, {"enable_layerwise_offload": True}):
        with Omni(str(folder), device="cpu", progress=False, **settings) as omni:
            pictures.append(np.asarray(omni.generate("a cat", **SETTINGS, seed=1)[0].images[0]))
    assert np.array_equal(pictures[0], pictures[1])
    assert np.array_equal(pictures[0], pictures[2])
