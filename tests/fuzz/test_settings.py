"""Settings that are nearly right, in files and in the bodies of requests."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from samovar.cache import TeaCacheConfig
from samovar.compose import AttachConfig
from samovar.core.errors import SamovarError
from samovar.engine import OmniDiffusionConfig
from samovar.lab.methods import read_method
from samovar.offload import OffloadConfig
from samovar.parallel import SequenceParallelConfig
from server.running import RunningServer

from .asking import Watched
from .cases import Fuzz, fuzzed
from .changes import TEXTS, changed_bytes, changed_json, weird, written


def defaults(cls: Any) -> dict[str, Any]:
    """Every setting of a class, by name, with its default as far as JSON has it."""
    found = {field.name: None if field.default is MISSING else field.default for field in fields(cls)}
    return {name: value if isinstance(value, (int, float, str)) else None for name, value in found.items()}


WHOLE: dict[str, Any] = {
    "model": "emoji", "dtype": "float32", "device": "cpu", "progress": False, "trust_remote_code": False,
    "cache": {**defaults(TeaCacheConfig), "backend": "tea_cache", "coefficients": [0, 0, 0, 1, 0]},
    "offload": {**defaults(OffloadConfig), "gpu_memory": "12GiB", "activations": {"vae": "1GiB"}, "exclude": []},
    "parallel": defaults(SequenceParallelConfig),
    "compile": False, "max_batch": 1, "max_queue": 16, "step_timeout_s": 60.0, "load_timeout_s": 1800.0,
}  # fmt: skip
ALIASED: dict[str, Any] = {
    "model": "emoji", "device": "cpu", "cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.2},
    "enable_layerwise_offload": True, "gpu_memory": 10**9, "ulysses_degree": 1,
}  # fmt: skip
TUNED: dict[str, Any] = {
    "origin": "samovar tune", "num_inference_steps": 4,
    "cache": {"backend": "tea_cache", "schedule": "##.#", "forecast_weights": {"cond": {"2": {"1": 1.9, "0": -0.9}}}},
}  # fmt: skip
BODY: dict[str, Any] = {
    "prompt": "a cat", "n": 1, "size": "16x16", "seed": 3, "num_inference_steps": 2, "guidance_scale": 3.5,
    "negative_prompt": "a dog", "output_format": "png", "stream": False, "partial_images": 0, "model": None,
    "deadline": 30, "priority": 0, "true_cfg_scale": 1.0, "max_sequence_length": 8, "user": "somebody",
}  # fmt: skip
TAGS = ["!!int ", "!!bool ", "!!timestamp ", "!!set ", "!!binary ", "!!python/name:os.system ", "&a ", "*a ", "<<: "]


def as_yaml(random: Random, value: Any) -> bytes:
    try:
        text = yaml.safe_dump(value, default_flow_style=random.choice([None, True, False]), allow_unicode=True)
    except (yaml.YAMLError, RecursionError, ValueError):
        text = "a: 1"
    if random.random() < 0.3:
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(TAGS) + text[at:]
    data = text.encode("utf-8", "surrogatepass")
    return changed_bytes(random, data) if random.random() < 0.3 else data


@fuzzed("settings", 300)
def test_no_file_of_settings_gives_any_other_error(fuzz: Fuzz, tmp_path: Path) -> None:
    for random in fuzz.cases():
        value = changed_json(random, random.choice([WHOLE, ALIASED, TUNED]))
        suffix = random.choice(["json", "yaml"])
        file = tmp_path / f"settings.{suffix}"
        data = written(random, value) if suffix == "json" else as_yaml(random, value)
        file.write_bytes(data)
        with fuzz.trying(data, suffix):
            for read in (
                lambda file=file: OmniDiffusionConfig.read({}, file).attach_config,
                lambda file=file: AttachConfig.of(cache=file),
                lambda file=file: AttachConfig.of(offload=file, parallel=file),
                lambda file=file: read_method(file),
            ):
                try:
                    read()
                    fuzz.ends["read"] += 1
                except SamovarError as error:
                    fuzz.ends["refused" if len(str(error)) < 4000 else pytest.fail(str(error))] += 1


@fuzzed("bodies", 60)
def test_no_body_is_a_fault_of_the_server(fuzz: Fuzz, server: RunningServer) -> None:
    watched = Watched(server)
    with server.client() as client:
        for random in fuzz.cases():
            value = changed_json(random, BODY)
            if isinstance(value, dict) and random.random() < 0.1:
                value[random.choice(TEXTS)] = weird(random)
            data = written(random, value)
            headers = {"Content-Type": random.choice(["application/json"] * 9 + ["application/json; charset=latin-1"])}
            with fuzz.trying(data, "json"):
                answer = client.post("/v1/images/generations", content=data, headers=headers)
                if answer.headers.get("content-type", "").startswith("text/event-stream"):
                    assert b"event: error" not in answer.content or b'"code"' in answer.content
                fuzz.ends[watched.answered(answer)] += 1
