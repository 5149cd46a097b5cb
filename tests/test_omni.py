"""The Python API."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from pipelines import tiny_flux_pipeline
from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import ModelError, SettingError
from samovar.engine import Done, Failed, OmniDiffusionConfig, Preview, Progress, Started
from samovar.omni import AsyncOmni, Omni


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return path


SETTINGS: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 1, "max_sequence_length": 8}


def test_a_list_gives_a_list_in_order_and_overrides_win(folder: Path) -> None:
    params = OmniDiffusionSamplingParams(**SETTINGS, seed=3)
    with Omni(str(folder), progress=False) as omni:
        both = omni.generate(["a cat", "a dog"], params)
        assert [result.prompt for result in both] == ["a cat", "a dog"]
        alone = omni.generate("a dog", params)[0]
        assert np.array_equal(np.asarray(both[1].images[0]), np.asarray(alone.images[0]))
        assert omni.generate("a dog", params, seed=9)[0].seeds == (9,)
        (mapped,) = omni.generate({"prompt": "a dog", "negative_prompt": "a cat"}, params)
        assert (mapped.prompt, mapped.seeds) == ("a dog", (3,))
        with pytest.raises(SettingError, match="Did you mean 'height'"):
            omni.generate("a dog", hieght=16)
        with pytest.raises(SettingError, match="prompt=5; expected text, a mapping, or a list of them"):
            omni.generate(5)  # type: ignore[call-overload]
        assert omni.generate("a dog", params)[0].seeds == (3,), "usable after an error"
    with pytest.raises(SettingError, match="This Omni is closed"):
        omni.generate("a dog")


def test_a_bad_setting_is_refused_before_anything_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: object) -> None:
        raise AssertionError("must be refused before")

    monkeypatch.setattr("samovar.engine.models.load_pipeline", loaded)
    monkeypatch.setattr("samovar.engine.process.WorkerGroup.__init__", loaded)
    for settings, message in (
        ({"ulysses_degree": 0}, "ulysses_degree=0; expected a number of ranks"),
        ({"cfg_parallel_size": 2, "cache_backend": "tee_cache"}, "Did you mean 'tea_cache'"),
        ({"enable_cpu_offload": True, "enable_layerwise_offload": True}, "exclude each other"),
        ({"gpu_memory": "lots"}, "gpu_memory"),
    ):
        with pytest.raises(SettingError, match=message):
            Omni(str(folder), device="cpu", **settings)


def test_a_loaded_pipeline_is_used_and_given_back(folder: Path) -> None:
    from diffusers import DiffusionPipeline

    with Omni(str(folder), device="cpu", progress=False) as omni:
        expected = np.asarray(omni.generate("a cat", **SETTINGS, seed=1)[0].images[0])
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    pipe("a cat", output_type="latent", **SETTINGS)  # A first run leaves attributes of diffusers' own.
    before = type(pipe), set(vars(pipe)), type(pipe.transformer), set(vars(pipe.transformer))
    with Omni(pipe, offload="layerwise", cache={"rel_l1_thresh": 0}) as omni:
        assert np.array_equal(np.asarray(omni.generate("a cat", **SETTINGS, seed=1)[0].images[0]), expected)
        assert set(vars(pipe.transformer)) != before[3], "something is on it"
    assert (type(pipe), set(vars(pipe)), type(pipe.transformer), set(vars(pipe.transformer))) == before
    with pytest.raises(SettingError, match=r"AsyncOmni loads the model in a worker process.*not a FluxPipeline"):
        AsyncOmni(pipe)
    with pytest.raises(SettingError, match="model=3; expected a name, a folder or a loaded pipeline"):
        Omni(3)


class Wrapped(diffusers.FluxPipeline):  # type: ignore[misc]
    """As people write it to set or log something at each call."""

    def __call__(self, prompt: str, **kwargs: Any) -> Any:
        return super().__call__(prompt=f"{prompt}, 3d style", **kwargs)


def test_a_class_of_ones_own_takes_what_its_parent_takes(folder: Path) -> None:
    pipe = Wrapped.from_pretrained(folder)
    with Omni(pipe, progress=False, gpu_memory="1GiB", tolerance="high") as omni:
        (result,) = omni.generate("a cat", seed=3, **SETTINGS | {"num_inference_steps": 2})
        with pytest.raises(SettingError, match="Wrapped does not take kwargs"):
            omni.generate("a cat", kwargs=1)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    (image,) = pipe("a cat", generator=generator, **SETTINGS | {"num_inference_steps": 2}).images
    assert np.array_equal(np.asarray(result.images[0]), np.asarray(image))


def test_a_bad_prompt_of_a_list_fails_alone(folder: Path) -> None:
    prompts: list[Any] = ["a cat", "a dog", 3, "an owl", "a cat", "a fox", "a hen", "a cow"]
    with Omni(str(folder), device="cpu", progress=False) as omni:
        results = omni.generate(prompts, **SETTINGS, seed=3)
        assert [result.prompt for result in results] == prompts
        assert [len(result.outputs) for result in results] == [1, 1, 0, 1, 1, 1, 1, 1]
        assert isinstance(results[2].error, SettingError)
        assert str(results[2].error) == "prompt=3; expected text."
        with pytest.raises(SettingError, match="prompt=3; expected text"):
            results[2].images  # noqa: B018 - It raises.
        assert np.array_equal(np.asarray(results[0].images[0]), np.asarray(results[4].images[0]))
        own: list[Any] = [{"prompt": "a cat", "height": 18}, {"prompt": "a cat", "heigth": 16}, "a dog"]
        messages = [str(result.error) for result in omni.generate(own, **SETTINGS)]
        assert "multiple of 4" in messages[0]
        assert "Did you mean 'height'" in messages[1]
        assert messages[2] == "None"
        for prompt in ("a cat", ["a cat", "a dog"]):
            with pytest.raises(SettingError, match="multiple of 4"):
                omni.generate(prompt, **SETTINGS | {"height": 18})
            with pytest.raises(SettingError, match="Did you mean 'num_inference_steps'"):
                omni.generate(prompt, num_inference_step=2)
        assert len(omni.generate("a cat", **SETTINGS)[0].images) == 1


def test_a_stream_tells_what_happens_and_can_be_left(folder: Path) -> None:
    settings = SETTINGS | {"num_inference_steps": 4, "seed": 3}
    with Omni(str(folder), device="cpu", progress=False) as omni:
        (plain,) = omni.generate("a cat", **settings)
        events = list(omni.generate(["a cat", "a dog"], stream=True, num_previews=1, **settings))
        kinds = [type(event) for event in events]
        one = [Started, Progress, Progress, Preview, Progress, Progress, Done]
        assert kinds == [*one, *one]
        done = [event for event in events if isinstance(event, Done)]
        assert np.array_equal(np.asarray(done[0].result.images[0]), np.asarray(plain.images[0]))
        (started, failed) = omni.generate("a cat", stream=True, height=18)
        assert isinstance(started, Started)
        assert isinstance(failed, Failed)
        steps = []
        for event in omni.generate("a cat", stream=True, **settings | {"num_inference_steps": 5000}):
            if isinstance(event, Progress):
                steps.append(event.step)
                if event.step == 3:
                    break
        assert steps == [1, 2, 3]
        assert len(omni.generate("a cat", **settings)[0].images) == 1, "nothing is left running"


def test_settings_come_as_a_whole_or_one_by_one_or_from_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[OmniDiffusionConfig] = []
    monkeypatch.setattr("samovar.omni.start_worker", lambda config, pipeline: made.append(config))
    whole = OmniDiffusionConfig(str(folder), device="cpu", dtype="float32")
    Omni(od_config=whole)
    Omni(str(folder), device="cpu", dtype="float32")
    (tmp_path / "omni.yaml").write_text(f"model: {folder}\ndevice: cpu\ndtype: bfloat16\n")
    Omni(config=tmp_path / "omni.yaml", dtype="float32")
    assert made == [whole] * 3
    with pytest.raises(SettingError, match="od_config holds all settings, and dtype was given too"):
        Omni(od_config=whole, dtype="float32")
    with pytest.raises(SettingError, match=r"'cache_bakend' is not a setting of Omni. Did you mean 'cache_backend'\?"):
        Omni("emoji", cache_bakend="tea_cache")
    with pytest.raises(SettingError, match="expected an OmniDiffusionConfig"):
        Omni(od_config="emoji")  # type: ignore[arg-type]


def test_async_omni_checks_its_settings_and_loads_nothing() -> None:
    omni = AsyncOmni("emoji", max_queue=3, device="cpu")
    assert (omni.config.max_queue, omni.config.progress) == (3, False)
    status = omni.status()
    assert (status.model, status.is_ready, status.worker_ids) == ("emoji", False, ())
    with pytest.raises(SettingError, match="has not been started"):
        _ = omni.defaults
    for settings, error in (({"max_queue": 0}, SettingError), ({"model": "emojy"}, ModelError)):
        with pytest.raises(error):
            AsyncOmni(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"devices": "0"}])
def test_one_program_has_one_worker(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SettingError, match=r"is for AsyncOmni and samovar serve.*Omni has one: leave it out"):
        Omni("emoji", **settings)
    assert AsyncOmni("emoji", **settings).config.num_replicas == settings.get("replicas", 1)


PROGRAM = """
import asyncio
import os
import sys

from samovar.engine import Done, OmniDiffusionSamplingParams, Progress
from samovar.core.errors import SettingError
from samovar.omni import AsyncOmni


async def main(folder):
    omni = AsyncOmni(folder, device="cpu", max_queue=2)
    await omni.start()
    params = OmniDiffusionSamplingParams(height=16, width=16, num_inference_steps=3, max_sequence_length=8, seed=1)
    assert not omni.can_edit and omni.defaults == OmniDiffusionSamplingParams()
    try:
        omni.submit("a cat", OmniDiffusionSamplingParams(height=18))
    except SettingError as error:
        print(error)
    events = [event async for event in omni.submit("a cat", params, num_previews=1)]
    print([type(event).__name__ for event in events])
    same = await omni.generate("a cat", params)
    assert same.images[0].tobytes() == events[-1].result.images[0].tobytes()
    long = OmniDiffusionSamplingParams(num_inference_steps=5000).over(params)
    task = asyncio.create_task(omni.generate("a cat", long))
    while not omni.status().running:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert (await omni.generate("a cat", params)).seeds == (1,)
    print(omni.status().failures, *omni.status().worker_ids)
    if sys.argv[2] == "close":
        await omni.close()
        assert omni.status().worker_ids == ()
    return omni


if __name__ == "__main__":
    omni = asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("ending", ["close", pytest.param("leave", marks=pytest.mark.slow)])
def test_a_program_leaves_no_process_no_memory_and_no_warning(folder: Path, tmp_path: Path, ending: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-W", "error::ResourceWarning", str(file), str(folder), ending]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert "multiple of 4" in lines[0]
    assert lines[1] == "['Started', 'Progress', 'Progress', 'Preview', 'Progress', 'Done']"
    *failures, worker = lines[2].split()
    assert " ".join(failures) == "{'cancelled': 1}"
    assert not Path(f"/proc/{worker}").exists()
    ours = {name for name in set(os.listdir("/dev/shm")) - before if "samovar" in name}
    assert ours == set()


def test_a_start_that_is_cancelled_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading:
        """Worker processes that load for ever."""

        num_ranks, process_ids = 1, (1,)

        def __init__(self, *args: object) -> None: ...

        def end(self, wait_s: float) -> None: ...

    async def main() -> bool:
        omni = AsyncOmni("emoji", device="cpu")
        try:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(omni.start(), 0.05)
            for _ in range(100):
                if not omni.status().is_alive:
                    return True
                await asyncio.sleep(0.01)
            return False
        finally:
            await omni.close()

    monkeypatch.setattr("samovar.engine.replica.WorkerGroup", Loading)
    assert asyncio.run(main())
