"""What a pipeline makes is known from its class; what it returns becomes images, videos and sounds."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines import PIPELINES, tiny_flux_pipeline
from pipelines.builder import Recipe, build
from pipelines.recipes import RECIPES
from samovar import Omni
from samovar.core.errors import EngineError, ModelError, SettingError
from samovar.engine import Done, Event, OmniDiffusionConfig, Progress, Worker
from samovar.engine.outputs import OutputKind, find_output, output_fields, take_outputs

VIDEO = OutputKind("video", "frames", fps=8.0)
UNKNOWN = {
    "DiffusionGemmaPipeline", "FluxPriorReduxPipeline", "KandinskyPriorPipeline", "KandinskyV22PriorEmb2EmbPipeline",
    "KandinskyV22PriorPipeline", "LLaDA2Pipeline", "MarigoldDepthPipeline", "MarigoldIntrinsicsPipeline",
    "MarigoldNormalsPipeline", "RFD4ProteinaPipeline", "SanaWMLTX2Refiner", "StableCascadePriorPipeline",
}  # fmt: skip
"""They make text, embeddings, depth or proteins; or they refine another's latents."""


@pytest.mark.slow
def test_every_pipeline_of_diffusers_has_a_kind_or_is_refused_by_name() -> None:
    import diffusers

    kinds: dict[str, str] = {}
    for name, cls in inspect.getmembers(diffusers, inspect.isclass):
        is_current = cls.__module__.startswith("diffusers.pipelines.") and "deprecated" not in cls.__module__
        if is_current and issubclass(cls, diffusers.DiffusionPipeline) and cls is not diffusers.DiffusionPipeline:
            try:
                kinds[name] = output_fields(cls)[0]
            except ModelError:
                assert name in UNKNOWN
    assert {"WanPipeline", "LTX2Pipeline", "CogVideoXPipeline"} <= {name for name in kinds if kinds[name] == "video"}
    assert {name for name in kinds if kinds[name] == "audio"} >= {"StableAudioPipeline", "AudioLDM2Pipeline"}
    assert not UNKNOWN & set(kinds)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Kandinsky5T2IPipeline", ("image", "image", None)),
        ("LTX2Pipeline", ("video", "frames", "audio")),
        ("StableAudioPipeline", ("audio", "audios", None)),
        ("KandinskyV22CombinedPipeline", ("image", "images", None)),
    ],
)
def test_the_kind_is_read_from_the_class(name: str, expected: tuple[str, str, str | None]) -> None:
    import diffusers

    cls = getattr(diffusers, name)
    assert output_fields(cls) == expected
    assert output_fields(type("Own", (cls,), {"__call__": lambda self, **call: None})) == expected, "as its parent"


def test_rates_and_lengths_are_read_off_the_pipeline() -> None:
    wan, ltx = (find_output(PIPELINES[name].build(0)) for name in ("wan", "ltx"))
    assert (wan.fps, wan.frames_argument, wan.frames, wan.frame_group) == (16.0, "num_frames", 81, 4)
    assert (ltx.fps, ltx.fps_argument, ltx.frame_group) == (25.0, "frame_rate", 8)
    assert [wan.frames_in(seconds, 16) for seconds in (0.01, 0.5, 1, 5)] == [1, 9, 17, 81]
    even = OutputKind("video", "frames", frames=88, frame_group=4)
    assert [even.frames_in(seconds, 15) for seconds in (0.01, 1, 6)] == [4, 16, 88]


RAMP = np.linspace(0, 1, 3 * 4 * 6 * 3).reshape(3, 4, 6, 3).astype(np.float32)
LEVELS = (RAMP * 255).round().astype(np.uint8)
FRAMES = [Image.fromarray(frame) for frame in LEVELS]


@pytest.mark.parametrize(
    "frames",
    [
        RAMP[None], torch.from_numpy(RAMP)[None].movedim(-1, 2), [FRAMES], FRAMES,
        [torch.from_numpy(RAMP).movedim(-1, 1)], [list(RAMP)], LEVELS[None],
    ],
    ids=["array", "tensor", "images", "bare images", "tensors", "lists", "bytes"],
)  # fmt: skip
def test_frames_come_in_many_forms(frames: Any) -> None:
    (video,) = take_outputs(VIDEO, SimpleNamespace(frames=frames))
    assert np.array_equal(video.frames, LEVELS)  # type: ignore[union-attr]


def test_a_video_may_have_sound_and_another_rate() -> None:
    kind, sound = OutputKind("video", "frames", "audio", 8.0, 16_000), torch.linspace(-1, 1, 100).reshape(1, 2, 50)
    (video,) = take_outputs(kind, SimpleNamespace(frames=RAMP[None], audio=sound), fps=12.0)
    assert (video.fps, video.audio.rate, video.audio.samples.shape) == (12.0, 16_000, (2, 50))  # type: ignore[union-attr]
    (silent,) = take_outputs(kind, SimpleNamespace(frames=RAMP[None], audio=None))
    assert silent.audio is None  # type: ignore[union-attr]


@pytest.mark.parametrize(("shape", "channels"), [((1, 50), 1), ((50,), 1), ((1, 1, 50), 1), ((1, 2, 50), 2)])
def test_sounds_come_with_channels_or_without(shape: tuple[int, ...], channels: int) -> None:
    (sound,) = take_outputs(OutputKind("audio", "audios", rate=100), SimpleNamespace(audios=torch.zeros(shape)))
    assert sound.samples.shape == (channels, 50)  # type: ignore[union-attr]


def test_layers_are_outputs_of_one_prompt_and_nan_and_a_wrong_count_are_errors() -> None:
    assert len(take_outputs(OutputKind(), SimpleNamespace(images=[FRAMES]))) == 3
    with pytest.raises(EngineError, match="contains NaN"):
        take_outputs(VIDEO, SimpleNamespace(frames=np.full((1, 2, 4, 4, 3), np.nan, np.float32)))
    with pytest.raises(EngineError, match="made 2 outputs for one prompt"):
        take_outputs(OutputKind(), SimpleNamespace(images=FRAMES[:2]))


def test_a_pipeline_of_no_known_kind_is_refused_before_it_is_loaded(tmp_path: Any) -> None:
    parts = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "scheduler": "DDIMScheduler"}
    texts = {"text_encoder": "CLIPTextModel", "tokenizer": "CLIPTokenizer"}
    index: dict[str, Any] = {"_class_name": "MarigoldDepthPipeline"}
    index |= {name: ["diffusers", kind] for name, kind in parts.items()}
    index |= {name: ["transformers", kind] for name, kind in texts.items()}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="MarigoldDepthPipeline returns latent, prediction, uncertainty"):
        Worker(OmniDiffusionConfig(str(tmp_path), device="cpu"))


@pytest.fixture(scope="module")
def wan() -> Any:
    with Omni(PIPELINES["wan"].build(0)) as omni:
        yield omni


SIZE = {"height": 32, "width": 48, "num_inference_steps": 2, "max_sequence_length": 16, "seed": 3}


def test_a_video_is_made_saved_and_its_steps_are_told(wan: Omni, tmp_path: Any) -> None:
    from samovar.media import read_video

    assert (wan.output.kind, str(wan.output)) == ("video", "video")
    events: list[Event] = list(wan.generate("a cat", stream=True, num_frames=9, **SIZE))
    assert sum(isinstance(event, Progress) for event in events) == 2
    result = events[-1].result  # type: ignore[union-attr]
    (video,) = result.videos
    assert (video.width, video.height, len(video), video.fps) == (48, 32, 9, 16.0)
    assert not result.images
    call = {name: value for name, value in SIZE.items() if name != "seed"}
    bare = PIPELINES["wan"].build(0)
    frames = bare("a cat", num_frames=9, generator=torch.Generator().manual_seed(3), output_type="np", **call).frames
    assert np.array_equal(video.frames, (frames[0] * 255).round().astype(np.uint8))
    (file,) = result.save(tmp_path / "cat.mp4")
    assert read_video(file).frames.shape == video.frames.shape
    with pytest.raises(SettingError, match="a video must end in"):
        result.save(tmp_path / "cat.png")


def test_seconds_and_rate_say_how_many_frames(wan: Omni) -> None:
    (result,) = wan.generate("a cat", seconds=1.0, fps=8.0, **SIZE)
    assert (len(result.videos[0]), result.videos[0].fps) == (9, 8.0)
    (result,) = wan.generate("a cat", num_frames=6, **SIZE)
    assert len(result.videos[0]) == 5
    assert "6 frames were asked for, and the model makes 5" in result.notes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["LTX2Pipeline", "SkyReelsV2DiffusionForcingPipeline"])
def test_steps_are_those_of_one_scheduler_where_a_pipeline_copies_it(name: str) -> None:
    """For the sound of a video, or for each of its frames."""
    import diffusers

    recipe = RECIPES.get(name, Recipe())
    with Omni(build(getattr(diffusers, name), recipe), progress=False) as omni:
        call = {"height": 32, "width": 48, "num_frames": 9, **recipe.call, "num_inference_steps": 3}
        events = list(omni.generate("a cat", stream=True, seed=3, **call))
    assert [(each.step, each.num_steps) for each in events if isinstance(each, Progress)] == [(1, 3), (2, 3), (3, 3)]
    assert isinstance(events[-1], Done)


def test_another_size_than_was_asked_for_is_noted() -> None:
    """Some pipelines, such as HiDream's, keep to the pixels that they know."""
    from diffusers import FluxPipeline
    from diffusers.pipelines.flux import FluxPipelineOutput

    class Enlarging(FluxPipeline):  # type: ignore[misc]
        def __call__(
            self, prompt: Any = None, height: int = 16, width: int = 16, generator: Any = None
        ) -> FluxPipelineOutput:
            how = {"height": 2 * height, "width": 2 * width, "generator": generator}
            return super().__call__(prompt, num_inference_steps=1, max_sequence_length=8, **how)

    with Omni(Enlarging(**tiny_flux_pipeline().components), progress=False) as omni:
        assert omni.generate("a cat")[0].notes == ()
        (result,) = omni.generate("a cat", width=24, height=16)
        assert result.notes == ("24x16 was asked for, and the model makes 48x32",)
