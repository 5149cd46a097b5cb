"""Reads a device setting, and refuses what this machine cannot use."""

from __future__ import annotations

import torch

from ..core.errors import SettingError


def read_device(device: str | torch.device | None) -> torch.device:
    """The device that a `device` setting names. None means a GPU if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SettingError(
            f"device={device!r} is not a device. Use 'cuda', 'cuda:1' for the second GPU, or 'cpu'.", param="device"
        ) from error
    if found.type not in ("cpu", "meta") and (found.index or 0) >= (count := _count(found.type)):
        seen = f"{count} GPUs" if count else "no GPU"
        raise SettingError(
            f"device={str(found)!r} cannot be used: torch {torch.__version__} finds {seen} here. Use another one, "
            "or 'cpu'.",
            param="device",
        )
    return found


def _count(kind: str) -> int:
    """Devices of a kind that torch can use."""
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if found is not None and found.type == kind else 0
