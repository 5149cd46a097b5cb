"""Tensors of any kind come apart into plain ones and go together again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.core.tensor_parts import (
    num_bytes_of,
    plainly,
    problem_of,
    rebuilt,
    take_apart,
)


class Scaled(torch.Tensor):
    """What torchao and quanto have: a tensor without memory, around others."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, device: Any = None) -> Scaled:
        size, where = values.shape, device or values.device
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32, device=where)
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, device: Any = None) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale, args[0].device)
        raise NotImplementedError(function)


class Odd(torch.Tensor):
    """A tensor that does not say what it is made of."""

    __torch_dispatch__ = Scaled.__torch_dispatch__


class State:
    """What bitsandbytes writes on a weight."""

    def __init__(self, absmax: torch.Tensor, inner: State | None = None) -> None:
        self.absmax, self.inner, self.blocksize = absmax, inner, 64


class Packed(torch.nn.Parameter):
    """What bitsandbytes and the GGUF parameters of diffusers have: memory, and more written on it."""

    state: State


def scaled() -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.int8).view(2, 3).t(), torch.ones(3, 1))


def packed() -> Packed:
    weight = Packed(torch.arange(8, dtype=torch.uint8), requires_grad=False)
    weight.state = State(torch.ones(2), State(torch.zeros(3)))
    return weight


def test_a_wrapper_is_what_is_inside_however_deep() -> None:
    inner, scale = scaled(), torch.ones(1)
    outer = Scaled(inner, scale)
    plain, wrappers = take_apart([outer, scale])
    assert [*map(id, plain)] == [id(inner.values), id(inner.scale), id(scale)]
    assert [wrapper.tensor is one for wrapper, one in zip(wrappers, (inner, outer), strict=True)] == [True, True]
    assert num_bytes_of([outer]) == 6 + 12 + 4
    assert num_bytes_of([scale, scale.view(1, 1)]) == 4


def test_together_again_with_strides_and_settings() -> None:
    one = scaled()
    two = rebuilt(one, torch.clone)
    assert type(two) is Scaled
    assert two.values.stride() == one.values.stride() == (1, 3)
    assert torch.equal(two.values, one.values)
    assert two.values.data_ptr() != one.values.data_ptr()
    weight = packed()
    other = rebuilt(weight, torch.clone)
    assert (type(other), other.state.blocksize) == (Packed, 64)
    assert other.state is not weight.state
    assert other.state.inner.absmax.data_ptr() != weight.state.inner.absmax.data_ptr()  # type: ignore[union-attr]


def test_a_wrapper_says_that_it_is_where_its_inner_tensors_are() -> None:
    lost = Scaled(torch.zeros(2, 3, dtype=torch.int8), torch.ones(2, 1), device="cuda")
    weight = torch.nn.Parameter(lost, requires_grad=False)
    outer = torch.nn.Parameter(Scaled(weight, torch.ones(1), device="cuda"), requires_grad=False)
    assert {weight.device.type, outer.device.type} == {"cuda"}
    identity, values, version = id(weight), weight.values, weight._version

    @plainly
    def follow() -> None:
        for wrapper in take_apart([outer]).wrappers:
            wrapper.follow()

    follow()
    assert {weight.device.type, outer.device.type} == {"cpu"}
    assert (id(weight), weight.values is values, weight._version) == (identity, True, version)
    assert isinstance(outer, torch.nn.Parameter)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (scaled(), "None"),
        (packed(), "None"),
        (torch.nn.Parameter(torch.zeros(2)), "None"),
        (torch.zeros(2).as_subclass(Odd), "test_tensor_parts.Odd, which does not say what it is made of"),
        (Scaled(torch.zeros(2).as_subclass(Odd), torch.ones(1)), "holds a test_tensor_parts.Odd"),
        (Scaled(torch.zeros(2, device="meta"), torch.ones(1)), "is on the meta device"),
        (torch.nn.parameter.UninitializedParameter(), "has no weights yet"),
        (torch.zeros(2, 2).to_sparse(), "is torch.sparse_coo"),
    ],
)
def test_what_cannot_be_taken_apart_says_why(tensor: torch.Tensor, expected: str) -> None:
    assert expected in str(problem_of(tensor))


def test_a_tensor_that_is_spread_over_ranks_is_refused_by_name(tmp_path: Any) -> None:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        spread = distribute_tensor(torch.zeros(2), init_device_mesh("cpu", (1,)))
        assert "DTensor, which is spread over several ranks" in str(problem_of(spread))
    finally:
        destroy_process_group()
