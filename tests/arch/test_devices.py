"""Devices: the one that a setting names, a default, and refusals that name the value."""

from __future__ import annotations

import pytest
import torch

from samovar.arch.devices import read_device
from samovar.core.errors import SettingError


def test_a_device_by_name_or_the_best_one_there_is() -> None:
    assert read_device("cpu") == read_device(torch.device("cpu")) == torch.device("cpu")
    assert read_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("device", ["gpu", "cuda:one", 1.5])
def test_a_value_that_is_not_a_device_is_refused(device: object) -> None:
    with pytest.raises(SettingError, match=r"is not a device. Use 'cuda'") as refusal:
        read_device(device)  # type: ignore[arg-type]
    assert refusal.value.param == "device"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without any")
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_an_accelerator_of_another_kind_is_refused_if_it_is_not_there(device: str) -> None:
    with pytest.raises(SettingError, match=rf"device='{device}' cannot be used: torch .* finds no GPU here"):
        read_device(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:2"])
def test_a_gpu_that_is_not_there_is_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match=r"cannot be used: torch .* finds no GPU here"):
        read_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device == "cuda:2" or read_device(device).type == "cuda"
    with pytest.raises(SettingError, match="finds 2 GPUs here"):
        read_device("cuda:2")
