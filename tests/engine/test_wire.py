"""Messages through a real pipe: pictures in memory without a name."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from PIL import Image

from samovar.engine.wire import receive, send


def through(message: Any) -> Any:
    here, there = Pipe()
    with here, there:
        sender = threading.Thread(target=send, args=(here, message, os.getpid()))
        sender.start()
        received = receive(there)
        sender.join()
    return received


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16"])
def test_pictures_arrive_bit_for_bit(mode: str) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    picture = Image.fromarray(levels).convert("L" if mode == "I;16" else mode).convert(mode)
    copy, nested = through((picture, {"deep": [picture]}))
    for each in (copy, nested["deep"][0]):
        assert (each.mode, each.size) == (picture.mode, picture.size)
        assert each.convert("RGBA").tobytes() == picture.convert("RGBA").tobytes()
    copy.putpixel((0, 0), 0)


def test_large_messages_and_none_at_all() -> None:
    text = "x" * 3_000_000
    assert through((text, None)) == (text, None)
    picture = Image.new("RGB", (2048, 2048), (1, 2, 3))
    assert through(picture).tobytes() == picture.tobytes()


def test_nothing_is_left_open_or_in_shared_memory() -> None:
    through(Image.new("RGB", (8, 8)))  # Whatever is opened once and for all.
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        through([Image.new("RGB", (64, 64))] * 3)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in os.listdir("/dev/shm") if "samovar" in name]


def test_the_end_of_a_pipe_is_an_error_of_pipes() -> None:
    here, there = Pipe()
    here.close()
    with pytest.raises((EOFError, OSError)):
        receive(there)
