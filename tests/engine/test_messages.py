"""What processes say to each other arrives as it was said."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import ModelError, NanLatentsError
from samovar.engine import Failed, PipelineFacts, Request
from samovar.engine.messages import Cancel, Fatal, Finished, Ready, Run, Update, receive, send
from samovar.engine.worker import Usage


def test_every_message_survives_the_pipe() -> None:
    facts = PipelineFacts("FluxPipeline", frozenset({"prompt", "height"}), 16, OmniDiffusionSamplingParams(height=64))
    messages = [
        Run(1, Request("a cat", OmniDiffusionSamplingParams(seed=1)), 3),
        Cancel(1),
        Ready(facts, 2.5, Usage(10, 0), 4),
        Finished(1, None, Usage(1, 2)),
    ]
    here, there = Pipe()
    with here, there:
        for message in messages:
            send(here, message, os.getpid())
            assert receive(there) == message
        send(here, Fatal(ModelError("no such model")), os.getpid())
        assert str(receive(there).error) == "no such model"
        send(here, Update(1, Failed(NanLatentsError("black", 3))), os.getpid())
        assert receive(there).event.error.step == 3
        send(here, Run(2, Request("a cat", image=Image.new("RGB", (9, 7)))), os.getpid())
        assert receive(there).request.image.size == (9, 7)


def through(message: Any) -> Any:
    here, there = Pipe()
    with here, there:
        sender = threading.Thread(target=send, args=(here, message, os.getpid()))
        sender.start()
        received = receive(there)
        sender.join()
    return received


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "I;16"])
def test_images_arrive_bit_for_bit(mode: str) -> None:
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
    before, shared = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    for _ in range(20):
        through([Image.new("RGB", (64, 64))] * 3)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "samovar" in name]


def test_the_end_of_a_pipe_is_an_error_of_pipes() -> None:
    here, there = Pipe()
    here.close()
    with pytest.raises((EOFError, OSError)):
        receive(there)
