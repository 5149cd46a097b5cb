"""Single modules: what they hold, take and weigh, compiled or not."""

from __future__ import annotations

import torch

from samovar.arch.modules import members, named_parts, parameters_of, tensor_bytes, unwrapped


def test_a_compiled_module_is_looked_through() -> None:
    plain = torch.nn.Linear(2, 2)
    assert unwrapped(plain) is plain
    assert unwrapped(torch.compile(plain)) is plain
    empty = torch.nn.Sequential()
    assert unwrapped(torch.compile(empty)) is empty, "one without children, too"
    assert list(parameters_of(torch.compile(plain))) == ["input"]


def test_paths_are_those_of_the_bare_model() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(2, 2))
    bare = torch.nn.Sequential(block)
    compiled = torch.nn.Sequential(torch.compile(block))
    assert named_parts(compiled) == named_parts(bare) | {"": compiled}
    assert list(named_parts(bare)) == ["", "0", "0.0"]


def test_a_container_has_every_position() -> None:
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert members(torch.nn.ModuleList([one, two, one])) == {"0": one, "1": two, "2": one}


def test_bytes_count_shared_tensors_once() -> None:
    one = torch.nn.Linear(4, 4, bias=False)
    two = torch.nn.Linear(4, 4, bias=False)
    two.weight = one.weight
    two.register_buffer("table", torch.zeros(3, dtype=torch.float16))
    assert tensor_bytes([one, two]) == 4 * 4 * 4 + 3 * 2
