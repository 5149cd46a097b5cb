"""When a model cannot be loaded or its pipeline fails, the message says what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from pipelines.builder import build
from pipelines.recipes import RECIPES
from pipelines.standins import standins
from samovar import Omni
from samovar.core.errors import ModelError
from samovar.engine.failures import described, is_out_of_memory, reason_of
from samovar.engine.request import OmniDiffusionSamplingParams as Params

without_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)


@pytest.mark.parametrize(
    ("params", "count", "kind", "words"),
    [
        (Params(width=64, height=48), 1, "image", "1 image of 64 x 48 pixels"),
        (Params(), 2, "image", "2 images of the default size"),
        (Params(width=64, height=48, num_frames=17), 1, "video", "1 video of 64 x 48 pixels, 17 frames"),
        (Params(seconds=3.5), 2, "audio", "2 sounds of 3.5 s"),
    ],
)
def test_what_did_not_fit_is_described(params: Params, count: int, kind: str, words: str) -> None:
    assert described(params, count, kind) == words


def test_errors_of_memory_are_known() -> None:
    assert is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def test_a_name_that_is_there_only_with_torchvision_is_explained() -> None:
    code = compile("def run():\n    return transforms.functional.resize\n", "module.py", "exec")
    for names, words in (
        ({"is_torchvision_available": bool}, "it needs torchvision, which is not installed: pip install torchvision."),
        ({}, "NameError: name 'transforms' is not defined"),
    ):
        exec(code, names)
        with pytest.raises(NameError) as caught:
            names["run"]()  # type: ignore[operator]
        assert reason_of(caught.value) == words


@without_torchvision
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "part"), [("QwenImageEditPipeline", "Qwen2VLProcessor"), ("OmniGenPipeline", "OmniGenPipeline")]
)
def test_a_model_that_needs_torchvision_says_so(name: str, part: str, tmp_path: Path) -> None:
    import diffusers

    with standins():
        build(getattr(diffusers, name), RECIPES[name]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"its {part} needs torchvision, which is not installed: pip install"):
        Omni(str(tmp_path), device="cpu")
