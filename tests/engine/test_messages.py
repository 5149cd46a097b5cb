"""What processes say to each other arrives as it was said."""

from __future__ import annotations

import os
from multiprocessing import Pipe

from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.engine import Failed, PipelineFacts, Request
from samovar.engine.messages import Answer, Drop, Make, Ready, Refused, Told
from samovar.engine.wire import receive, send
from samovar.engine.worker import Usage
from samovar.errors import ModelError, NanLatentsError


def test_every_message_survives_the_pipe() -> None:
    facts = PipelineFacts("FluxPipeline", frozenset({"prompt", "height"}), 16, OmniDiffusionSamplingParams(height=64))
    messages = [
        Make(1, (Request("a cat", OmniDiffusionSamplingParams(seed=1)),)),
        Drop(1, 0),
        Ready(facts, 2.5, Usage(10, 0), 4),
        Answer(1, (None,), Usage(1, 2)),
    ]
    here, there = Pipe()
    with here, there:
        for message in messages:
            send(here, message, os.getpid())
            assert receive(there) == message
        send(here, Refused(ModelError("no such model")), os.getpid())
        assert str(receive(there).error) == "no such model"
        send(here, Told(1, 0, Failed(NanLatentsError("black", 3))), os.getpid())
        assert receive(there).event.error.step == 3
        send(here, Make(2, (Request("a cat", image=Image.new("RGB", (9, 7))),)), os.getpid())
        assert receive(there).requests[0].image.size == (9, 7)
