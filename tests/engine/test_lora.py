"""A request with an adapter gets the bits that diffusers gives with that adapter alone, whatever ran before it."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines import tiny_flux_pipeline
from pipelines.adapters import TARGETS, save_adapter, save_adapters
from samovar import Omni
from samovar.core.errors import ModelError, SettingError
from samovar.engine import OmniDiffusionConfig, PipelineFacts, Request
from samovar.engine.lora import Adapter, Adapters, fetch_adapter, read_choice
from samovar.engine.models import load_pipeline
from simulated import SimulatedRecorder, recording_by

CALL: dict[str, Any] = {"height": 16, "width": 32, "num_inference_steps": 10, "max_sequence_length": 8}
BOTH = [{"name": "ink", "scale": 0.7}, {"name": "pixel", "scale": -0.2}]
ORDERS: list[Any] = ["pixel", None, "ink", BOTH, "pixel", None]
"""What is asked for, one after the other, in one engine."""


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(tiny_flux_pipeline(), tmp_path_factory.mktemp("adapters"))


def picture(pipe: Any, **changes: Any) -> Any:
    """As the pipeline makes it without us."""
    call: dict[str, Any] = {**CALL, **changes, "generator": torch.Generator().manual_seed(3)}
    return np.asarray(pipe("a cat", **call).images[0])


def diffusers_way(pipe: Any, lora: dict[str, str]) -> Mapping[str, Any]:
    """The picture of each order by a bare pipeline, in which nothing else was ever loaded."""
    made = {}
    for order in ORDERS:
        chosen = read_choice(order)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")
            for name, _ in chosen:
                pipe.load_lora_weights(lora[name], adapter_name=name)
        if chosen:
            pipe.set_adapters([name for name, _ in chosen], [scale for _, scale in chosen])
        made[str(order)] = picture(pipe)
        pipe.unload_lora_weights()
    assert len({each.tobytes() for each in made.values()}) == 4, "each adapter changes the picture"
    return made


@pytest.fixture(scope="session")
def expected(lora: dict[str, str]) -> Mapping[str, Any]:
    return diffusers_way(tiny_flux_pipeline(), lora)


def made_by(omni: Omni, order: Any) -> Any:
    (result,) = omni.generate("a cat", lora=order, seed=3, **CALL)
    assert result.lora == read_choice(order)
    return np.asarray(result.images[0])


def lora_layers(pipe: Any) -> list[str]:
    return [path for path, _ in pipe.transformer.named_modules() if "lora" in path]


SKIPS_NOTHING = {"rel_l1_thresh": 0.0}
TIGHT = {"offload": {"mode": "auto", "activations": 0, "device": "cpu"}, "gpu_memory": 105_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {},
    "model": {"offload": "model"},
    "layerwise": {"offload": "layerwise"},
    "budget": TIGHT,
    "cache": {"cache": SKIPS_NOTHING},
    "cache and layerwise": {"cache": SKIPS_NOTHING, "offload": "layerwise"},
    "one at a time": {"lora_memory": 7600},
    "one at a time within a budget": {"lora_memory": 7600, **TIGHT},
    "one at a time, cache and model": {"lora_memory": 7600, "cache": SKIPS_NOTHING, "offload": "model"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_adapter_gives_the_bits_of_diffusers(name: str, lora: dict[str, str], expected: Mapping[str, Any]) -> None:
    pipe = tiny_flux_pipeline()
    with Omni(pipe, lora=lora, device="cpu", **SETTINGS[name]) as omni:
        assert ("blocks stream" in str(omni.explain())) is ("budget" in name or "layerwise" in name)
        assert omni.adapters == tuple(TARGETS)
        for order in ORDERS:
            if order is BOTH and "lora_memory" in SETTINGS[name]:
                with pytest.raises(
                    SettingError, match=r"the adapters have \d+ bytes together, and lora_memory is 7600"
                ):
                    made_by(omni, order)
            else:
                assert np.array_equal(made_by(omni, order), expected[str(order)]), order
    assert not lora_layers(pipe), "they come off again"
    assert np.array_equal(picture(pipe), expected["None"])


CACHE_DIT = {"backend": "cache_dit", "Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 3,
             "residual_diff_threshold": 0.3}  # fmt: skip


@pytest.mark.parametrize("setting", [{"rel_l1_thresh": 0.3}, "auto", CACHE_DIT])
def test_a_cache_that_skips_knows_nothing_of_other_adapters(lora: dict[str, str], setting: Any) -> None:
    """As in an engine that has served nobody else."""
    cache = {"cache": setting}
    alone = {}
    for order in ("pixel", "ink", None):
        with Omni(tiny_flux_pipeline(), lora=lora, device="cpu", **cache) as omni:
            alone[order] = made_by(omni, order)
    with Omni(tiny_flux_pipeline(), lora=lora, device="cpu", **cache) as omni:
        for order in ("pixel", "ink", "pixel", None, "ink"):
            assert np.array_equal(made_by(omni, order), alone[order]), order
        (result,) = omni.generate("a cat", lora="ink", seed=3, **CALL)
        assert setting is CACHE_DIT or result.cache[0].skipped > 0


def test_quantised_weights_take_adapters(lora: dict[str, str], folder: Path) -> None:
    config = OmniDiffusionConfig(str(folder), device="cpu", quantization="int8", lora=lora, progress=False)
    pipe = load_pipeline(folder, torch.float32, quantization=config.quantised())
    pipe.set_progress_bar_config(disable=True)
    expected = diffusers_way(pipe, lora)
    for offload in (None, "layerwise"):
        with Omni(str(folder), device="cpu", quantization="int8", lora=lora, progress=False, offload=offload) as omni:
            for order in ORDERS:
                assert np.array_equal(made_by(omni, order), expected[str(order)]), (offload, order)


@pytest.mark.slow
def test_weights_that_are_packed_into_one_dimension_take_them_too(lora: dict[str, str], folder: Path) -> None:
    pytest.importorskip("sdnq")
    shares = {}
    for kind in (None, "int4"):
        with Omni(str(folder), device="cpu", quantization=kind, lora=lora, progress=False) as omni:
            made = {order: made_by(omni, order).astype(float) for order in (None, "pixel", "ink")}
            assert np.array_equal(made_by(omni, None), made[None])
        shares[kind] = {order: made[order] - made[None] for order in ("pixel", "ink")}
    for order, change in shares["int4"].items():
        angle = np.vdot(change, shares[None][order]) / np.linalg.norm(change) / np.linalg.norm(shares[None][order])
        assert angle > 0.7, "it changes the image as it changes that of exact weights"


def test_what_peft_has_saved_is_taken(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    other = tiny_flux_pipeline()
    config = LoraConfig(r=2, lora_alpha=5, target_modules=["to_q", "proj_out"], init_lora_weights=False)
    model = get_peft_model(other.transformer, config)
    model.save_pretrained(tmp_path)
    other.transformer = model.base_model.model
    with Omni(tiny_flux_pipeline(), lora={"a.b": tmp_path}, device="cpu") as omni:
        assert np.array_equal(made_by(omni, "a.b"), picture(other))


def test_a_switch_reads_no_file(tmp_path: Path, expected: Mapping[str, Any]) -> None:
    mine = save_adapters(tiny_flux_pipeline(), tmp_path)
    with Omni(tiny_flux_pipeline(), lora=mine, device="cpu") as omni:
        shutil.rmtree(tmp_path)
        for order in ("pixel", "ink", "pixel"):
            assert np.array_equal(made_by(omni, order), expected[order])


def test_the_least_recently_used_adapter_makes_room(tmp_path: Path) -> None:
    pipe = tiny_flux_pipeline()
    sources = {name: save_adapter(pipe, tmp_path / name, ["to_q"], seed) for seed, name in enumerate("abc")}
    size = Adapters(pipe, {"a": sources["a"]}).bytes["a"]
    pipe.unload_lora_weights()
    adapters = Adapters(pipe, sources, 2 * size)
    assert adapters._loaded == ["b", "c"]
    for name, left in (("b", "cb"), ("a", "ba"), ("b", "ab"), ("c", "bc")):
        adapters.use((Adapter(name),))
        assert "".join(adapters._loaded) == left
        assert set(pipe.get_list_adapters()["transformer"]) == {adapters._inner[each] for each in left}
        assert adapters.loaded_bytes == 2 * size
    (tmp_path / "a" / "pytorch_lora_weights.safetensors").touch()
    with pytest.raises(ModelError, match=r"The adapter 'a', .* has changed since it was registered"):
        adapters.use((Adapter("a"),))
    shutil.rmtree(tmp_path)
    with pytest.raises(ModelError, match=r"The adapter 'a', .* cannot be loaded"):
        adapters.use((Adapter("a"),))
    adapters.use((Adapter("b"),))
    assert pipe.get_active_adapters() == ["samovar_1"], "a file that is gone costs one request"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("pixle", "lora: 'pixle' is not a registered adapter. Did you mean 'pixel'"),
        ("/etc/passwd", "is not a registered adapter"),
        (["pixel", "pixel"], "'pixel' is given twice"),
        (7, "lora=7; expected the name of an adapter"),
        ({"scale": 1.0}, "expected the name of an adapter"),
        ({"name": "pixel", "path": "x"}, "'path' is not a part of an adapter in lora"),
        ({"name": "pixel", "scale": "1"}, "the scale of 'pixel' must be a number, not '1'"),
        ({"name": "pixel", "scale": float("nan")}, "the scale of 'pixel' must be a number, not nan"),
        ({"name": "pixel", "scale": True}, "must be a number, not True"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(order: Any, message: str) -> None:
    facts = PipelineFacts("Pipeline", frozenset(), 16, adapters={"pixel": 1, "ink": 1})
    with pytest.raises(SettingError, match=message):
        facts.check(Request("", lora=order))


def test_without_adapters_the_setting_is_named() -> None:
    with pytest.raises(SettingError, match=r"'pixel' is not a registered adapter. None is registered: see the setting"):
        PipelineFacts("Pipeline", frozenset(), 16).check(Request("", lora="pixel"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pixel", "lora='pixel'; expected files or folders by name"),
        ({"": "x"}, "'' is not a name for an adapter"),
        ({"a": 3}, "'a' must be a file or a folder, not 3"),
        ({"a": "nowhere.bin"}, "which is not a .safetensors file"),
        ({"a": "/no/where/x.safetensors"}, "which is not a .safetensors file"),
    ],
)
def test_adapters_that_cannot_be_are_refused_before_anything_is_loaded(setting: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OmniDiffusionConfig("emoji", device="cpu", lora=setting)


def test_a_folder_must_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"has no .safetensors file"):
        OmniDiffusionConfig("emoji", device="cpu", lora={"a": tmp_path})
    for name in ("one", "two"):
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SettingError, match=r"has 'one.safetensors', 'two.safetensors'. Name one file"):
        OmniDiffusionConfig("emoji", device="cpu", lora={"a": tmp_path})
    with pytest.raises(SettingError, match="lora_memory='much'; expected a size"):
        OmniDiffusionConfig("emoji", device="cpu", lora_memory="much")


def test_an_adapter_of_the_hub_is_found_in_the_local_cache(
    lora: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    revision = "0" * 40
    kept = tmp_path / "models--me--pixel" / "snapshots" / revision
    shutil.copytree(lora["pixel"], kept)
    (tmp_path / "models--me--pixel" / "refs").mkdir()
    (tmp_path / "models--me--pixel" / "refs" / "main").write_text(revision)
    file = kept / "pytorch_lora_weights.safetensors"
    for source in ("me/pixel", f"me/pixel/{file.name}"):
        assert fetch_adapter("pixel", source) == file
    with pytest.raises(ModelError, match="'me/other', is not a file here and could not be downloaded"):
        fetch_adapter("other", "me/other")


def broken(lora: dict[str, str], folder: Path, change: Any) -> dict[str, Path]:
    file = folder / "x.safetensors"
    save_file(change(load_file(Path(lora["pixel"]) / "pytorch_lora_weights.safetensors")), file)
    return {"x": file}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {f"unet.{name}": tensor for name, tensor in w.items()}, "has no weights for this FluxPipeline"),
        (lambda w: w | {"transformer.nothing.lora_A.weight": torch.zeros(2, 16)}, "The adapter 'x', .*"),
        (lambda w: {name: tensor[..., :1].contiguous() for name, tensor in w.items()}, "cannot be loaded"),
    ],
    ids=["another model", "unknown layers", "other shapes"],
)
def test_an_adapter_that_does_not_fit_is_refused_at_the_start(
    lora: dict[str, str], tmp_path: Path, change: Any, message: str
) -> None:
    pipe = tiny_flux_pipeline()
    with pytest.raises(ModelError, match=message):
        Omni(pipe, lora=broken(lora, tmp_path, change), device="cpu")
    assert not lora_layers(pipe)


def test_an_adapter_that_changes_the_model_itself_is_refused(lora: dict[str, str], tmp_path: Path) -> None:
    """As control adapters of FLUX do with its norms: diffusers overwrites them."""
    name = "transformer.transformer_blocks.0.attn.norm_q.weight"
    sources = broken(lora, tmp_path, lambda weights: weights | {name: torch.full((8,), 2.0)})
    pipe = tiny_flux_pipeline()
    before = picture(pipe)
    with pytest.raises(ModelError, match="changes weights of the model itself"):
        Omni(pipe, lora=sources, device="cpu")
    assert np.array_equal(picture(pipe), before)


def test_a_pipeline_with_adapters_of_its_own_is_refused(lora: dict[str, str]) -> None:
    pipe = tiny_flux_pipeline()
    pipe.load_lora_weights(lora["ink"], adapter_name="theirs")
    with pytest.raises(SettingError, match=r"has adapters already: 'theirs'. Take them off first"):
        Omni(pipe, lora=lora, device="cpu")
    assert pipe.get_active_adapters() == ["theirs"]


def test_without_peft_it_says_what_to_install(lora: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"lora needs peft, which is not installed: pip install peft"):
        Adapters(object(), lora)


def test_an_adapter_larger_than_the_memory_for_all_is_refused(lora: dict[str, str]) -> None:
    with pytest.raises(SettingError, match=r"lora_memory=1100 bytes is too little for the adapter 'pixel', which has"):
        Omni(tiny_flux_pipeline(), lora=lora, lora_memory=1100, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SETTINGS if "budget" not in name])
def test_a_gpu_gives_the_bits_of_diffusers(name: str, lora: dict[str, str]) -> None:
    expected = diffusers_way(tiny_flux_pipeline().to("cuda"), lora)
    with Omni(tiny_flux_pipeline(), lora=lora, device="cuda", **SETTINGS[name]) as omni:
        for order in ORDERS:
            if order is not BOTH or "lora_memory" not in SETTINGS[name]:
                assert np.array_equal(made_by(omni, order), expected[str(order)]), order


@pytest.mark.slow
def test_compiled_blocks_follow_a_switch(lora: dict[str, str], expected: Mapping[str, Any]) -> None:
    with Omni(tiny_flux_pipeline(), lora=lora, device="cpu", compile="eager") as omni:
        for order in ("pixel", None, "ink", "pixel"):
            assert np.array_equal(made_by(omni, order), expected[str(order)]), order


def test_replayed_forwards_follow_a_switch(lora: dict[str, str], expected: Mapping[str, Any]) -> None:
    simulated = recording_by(SimulatedRecorder(), torch.device("cpu"))
    with simulated, Omni(tiny_flux_pipeline(), lora=lora, device="cpu", compile="graphs") as omni:
        for order in ORDERS:
            assert np.array_equal(made_by(omni, order), expected[str(order)]), order
        assert "52 calls replayed, 8 run" in str(omni.explain())


def test_scales_that_others_ask_for_cost_nobody_a_recording(lora: dict[str, str]) -> None:
    def run() -> int:
        return int(str(omni.explain()).split(" calls replayed, ")[1].split(" run")[0])

    simulated = recording_by(SimulatedRecorder(), torch.device("cpu"))
    with simulated, Omni(tiny_flux_pipeline(), lora=lora, device="cpu", compile="graphs") as omni:
        for order in (None, "ink"):
            made_by(omni, order)
        before = run()
        for scale in (0.5, 0.25):
            made_by(omni, {"name": "pixel", "scale": scale})
            with_scale = run()
            assert with_scale == before + 2, "that is another form"
            for order in (None, "ink"):
                made_by(omni, order)
            before = run()
            assert before == with_scale


def test_what_cannot_be_attached_leaves_no_adapters(lora: dict[str, str]) -> None:
    pipe = tiny_flux_pipeline()
    with pytest.raises(SettingError, match="is not enough"):
        Omni(pipe, lora=lora, **{**TIGHT, "gpu_memory": 10_000})
    assert not lora_layers(pipe)


def test_settings_of_a_file_name_adapters(lora: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "samovar.json"
    file.write_text(json.dumps({"lora": lora, "lora_memory": "1MiB", "device": "cpu"}))
    config = OmniDiffusionConfig.read({}, file)
    assert (config.lora, config.lora_bytes) == (lora, 2**20)
