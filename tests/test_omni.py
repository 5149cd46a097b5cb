"""The Python API."""

from __future__ import annotations

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
