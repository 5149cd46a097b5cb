"""The GPUs of each replica: decided before anything is loaded, and refused if it cannot be."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from ..core.errors import SettingError


def read_gpus(devices: Any) -> tuple[int, ...]:
    """The numbers of GPUs, from such as "0,1", [0, 1] or "cuda:0,cuda:1"; ValueError for what is none."""
    parts = devices.split(",") if isinstance(devices, str) else devices if isinstance(devices, Sequence) else [devices]
    found = [re.fullmatch(r"(?:cuda:)?(\d{1,4})", str(part).strip(), re.ASCII) for part in parts]
    if not found or not all(found) or any(isinstance(part, bool) for part in parts):
        raise ValueError
    return tuple(int(match[1]) for match in found if match is not None)


def place_replicas(
    replicas: int | None, gpus: Sequence[int], device: torch.device, num_ranks: int, num_gpus: int
) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each replica, one for each rank; none of its own on a CPU, and none if the only worker may choose.

    A GPU that is named more than once has several replicas.
    """
    _check_device(replicas, gpus, device, num_ranks, num_gpus)
    if not gpus and (replicas in (None, 1) or device.type != "cuda"):
        return ((),) * (replicas or 1)
    count = replicas or max(1, len(gpus) // num_ranks)
    needed = count * num_ranks
    gpus = gpus or range(needed)
    if missing := ", ".join(str(gpu) for gpu in gpus if gpu >= num_gpus):
        raise SettingError(
            f"{count} replicas of {num_ranks} ranks would take GPU {missing} too, and torch finds {num_gpus} here, "
            f"from 0 to {num_gpus - 1}. CUDA_VISIBLE_DEVICES, if it is set, says which. Name others; or, if several "
            "workers fit on one GPU, name it more than once in devices, such as '0,0', and limit gpu_memory.",
            param="devices",
        )
    if len(gpus) != needed:
        raise SettingError(
            f"devices names {len(gpus)} GPUs ({', '.join(map(str, gpus))}), and {count} replicas of {num_ranks} ranks "
            f"take {needed}. Name as many, or change replicas or parallel.",
            param="devices",
        )
    groups = tuple(tuple(gpus[start : start + num_ranks]) for start in range(0, needed, num_ranks))
    for group in groups:
        if len(set(group)) < num_ranks:
            raise SettingError(
                f"devices gives the ranks of one replica the GPUs {', '.join(map(str, group))}, and each rank needs "
                f"one of its own. A replica has {num_ranks} neighbours of the list: order it so that they differ.",
                param="devices",
            )
    return groups


def _check_device(
    replicas: int | None, gpus: Sequence[int], device: torch.device, num_ranks: int, num_gpus: int
) -> None:
    """Refuse a device that is not what these settings take."""
    takes_several = num_ranks > 1 or bool(gpus) or (device.type == "cuda" and (replicas or 1) > 1)
    if device.index is not None and takes_several:
        raise SettingError(
            f"device={str(device)!r} names one device, and these settings take several. Give 'cuda' or 'cpu', and "
            "choose GPUs with devices or the environment variable CUDA_VISIBLE_DEVICES.",
            param="device",
        )
    if gpus and device.type != "cuda":
        raise SettingError(
            f"devices names GPUs ({', '.join(map(str, gpus))}), and the device is {str(device)!r}. Leave it out, and "
            f"give replicas={len(gpus)} for as many workers; or device='cuda'.",
            param="devices",
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if not gpus and num_ranks > 1 and device.type == "cuda" and here > num_gpus:  # NCCL cannot share one.
        raise SettingError(
            f"{here} ranks on this machine need a GPU each, and it has {num_gpus}. Choose smaller degrees, or "
            "device='cpu'.",
            param="parallel",
        )
