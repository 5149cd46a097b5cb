"""Single modules: what they hold, take and weigh, compiled or not."""

from __future__ import annotations

import torch

from samovar.arch.modules import named_parts, tensor_bytes


def test_paths_are_those_of_the_bare_model() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2))
    bare = torch.nn.Sequential(block)
    compiled = torch.nn.Sequential(torch.compile(block))
    assert named_parts(compiled) == named_parts(bare) | {"": compiled}
    assert list(named_parts(bare)) == ["", "0", "0.0"]


def test_bytes_count_shared_tensors_once() -> None:
    one = torch.nn.Linear(4, 4, bias=False)
    two = torch.nn.Linear(4, 4, bias=False)
    two.weight = one.weight
    two.register_buffer("table", torch.zeros(3, dtype=torch.float16))
    assert tensor_bytes([one, two]) == 4 * 4 * 4 + 3 * 2
