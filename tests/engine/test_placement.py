"""Each replica has its GPUs, or the setting is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from samovar.core.errors import SettingError
from samovar.engine.placement import place_replicas, read_gpus
from samovar.engine.process import _environment, visible_gpus
from samovar.engine.settings import OmniDiffusionConfig as Config

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("devices", ["0,2", " cuda:0, 2", [0, 2], (0, "2"), ["cuda:0", "cuda:2"]])
def test_gpus_may_be_written_in_several_ways(devices: Any) -> None:
    assert read_gpus(devices) == (0, 2)


@pytest.mark.parametrize("devices", ["", "0,", "gpu", "-1", "cpu,cpu", [], [True], [0.5], "0;1", "٣"])
def test_what_is_no_gpu_is_refused(devices: Any) -> None:
    with pytest.raises(SettingError, match=r"devices=.*expected the numbers of GPUs"):
        read_gpus(devices)


@pytest.mark.parametrize(
    ("replicas", "gpus", "device", "num_ranks", "groups"),
    [
        (None, (), CUDA, 1, ((),)),
        (1, (), CUDA, 1, ((),)),
        (None, (), CUDA, 2, ((),)),
        (3, (), CPU, 1, ((), (), ())),
        (2, (), CPU, 2, ((), ())),
        (3, (), CUDA, 1, ((0,), (1,), (2,))),
        (None, (3, 1), CUDA, 1, ((3,), (1,))),
        (2, (3, 1), CUDA, 1, ((3,), (1,))),
        (None, (1,), CUDA, 1, ((1,),)),
        (None, (0, 0), CUDA, 1, ((0,), (0,))),
        (2, (), CUDA, 2, ((0, 1), (2, 3))),
        (None, (0, 2, 1, 3), CUDA, 2, ((0, 2), (1, 3))),
        (1, (2, 3), CUDA, 2, ((2, 3),)),
    ],
)
def test_gpus_are_divided(replicas: Any, gpus: Any, device: Any, num_ranks: int, groups: Any) -> None:
    assert place_replicas(replicas, gpus, device, num_ranks, 4) == groups


@pytest.mark.parametrize(
    ("replicas", "gpus", "device", "num_ranks", "message"),
    [
        (0, (), CPU, 1, "replicas must be a whole number, 1 or more, not 0"),
        (True, (), CPU, 1, "replicas must be a whole number"),
        (5, (), CUDA, 1, "replicas=5 need 5 GPUs, and this machine has 4. Give fewer; or, if several fit"),
        (3, (), CUDA, 2, "replicas=3 of 2 ranks need 6 GPUs, and this machine has 4"),
        (3, (0, 1), CUDA, 1, r"devices names 2 GPUs \(0, 1\), and replicas=3 need 3. Name as many, or change replicas"),
        (2, (0, 1, 2, 3), CUDA, 1, "devices names 4 GPUs .* and replicas=2 need 2"),
        (None, (0, 1, 2), CUDA, 2, "2 ranks a replica need a multiple of 2. Name as many, or change parallel"),
        (None, (0,), CUDA, 2, "2 ranks a replica need a multiple of 2"),
        (None, (0, 0, 1, 1), CUDA, 2, "the GPUs 0, 0, and each rank needs one of its own"),
        (None, (3, 4, 9), CUDA, 1, "devices names GPU 4, 9, and torch finds 4 here, from 0 to 3"),
        (None, (0, 1), CPU, 1, "devices names GPUs .* and the device is 'cpu'. Leave it out, and give replicas=2 for"),
        (2, (), torch.device("cuda:1"), 1, "device='cuda:1' names one GPU, and devices or replicas choose others"),
        (None, (0, 1), torch.device("cuda:1"), 1, "device='cuda:1' names one GPU"),
    ],
)
def test_what_cannot_be_placed_is_refused(replicas: Any, gpus: Any, device: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        place_replicas(replicas, gpus, device, num_ranks, 4)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_settings_say_how_many_replicas_there_are(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config("emoji").num_replicas == 1
    assert Config("emoji", devices="0,1,2,3").gpus == ((0,), (1,), (2,), (3,))
    ranks = Config("emoji", devices=[0, 1, 2, 3], ulysses_degree=2)
    assert (ranks.num_replicas, ranks.num_ranks, ranks.gpus) == (2, 2, ((0, 1), (2, 3)))
    assert Config("emoji", replicas=9, device="cpu").num_replicas == 9
    with pytest.raises(SettingError, match="devices names GPU 4"):
        Config("emoji", devices="4")
    monkeypatch.setenv("SAMOVAR_REPLICAS", "2")
    assert Config.read({}).gpus == ((0,), (1,))
    monkeypatch.setenv("SAMOVAR_DEVICES", "3,2")
    assert Config.read({}).gpus == ((3,), (2,))


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, False),
        ({"replicas": 1}, False),
        ({"replicas": 2}, True),
        ({"devices": "0,1"}, True),
        ({"devices": "1"}, False),
        ({"replicas": 2, "offload": {"mode": "layerwise", "share": False}}, False),
    ],
)
def test_replicas_share_the_host_copy_unless_told_otherwise(
    four_gpus: None, settings: dict[str, Any], share: bool
) -> None:
    offload = Config("emoji", **{"offload": "layerwise", **settings}).attach_config.offload
    assert offload is not None
    assert offload.share is share


def test_a_worker_sees_only_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_gpus([2, 0], None) == "2,0"
    assert visible_gpus([1], "GPU-aa, GPU-bb,GPU-cc") == "GPU-bb"
    config = Config("emoji", device="cpu")
    for before in (None, "4,5"):
        if before is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
        with _environment(config, (1,)):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ("1" if before is None else "5")
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
        with _environment(config):
            assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
