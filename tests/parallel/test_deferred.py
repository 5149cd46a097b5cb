"""A tensor that is fetched when it is first needed."""

from __future__ import annotations

import copy

import torch

from samovar.parallel.deferred import DeferredTensor


def deferred() -> tuple[DeferredTensor, torch.Tensor, list[int]]:
    value, fetched = torch.arange(12.0).reshape(3, 4), []

    def fetch() -> torch.Tensor:
        fetched.append(1)
        return value

    return DeferredTensor(torch.empty(3, 4), fetch), value, fetched


def test_nothing_is_fetched_for_its_form() -> None:
    tensor, _, fetched = deferred()
    assert tensor.shape == (3, 4)
    assert (tensor.dtype, tensor.device, tensor.ndim, len(tensor)) == (torch.float32, torch.device("cpu"), 2, 3)
    assert isinstance(tensor, torch.Tensor)
    part = tensor[:, :2][0].detach()
    assert isinstance(part, DeferredTensor)
    assert part.shape == (2,)
    assert fetched == []
    assert torch.equal(part + 0, torch.tensor([0.0, 1.0]))
    assert fetched == [1]


def test_any_operation_fetches_it_once() -> None:
    for operation in (
        lambda t: t + 1,
        lambda t: 1 - t,
        lambda t: t.chunk(2),
        lambda t: torch.cat([t, t]),
        lambda t: t.to(torch.float64).numpy(),
        lambda t: t.numpy(),
        lambda t: t.tolist(),
        lambda t: t.mul_(2),
        lambda t: t.max().item(),
        repr,
        copy.deepcopy,
    ):
        tensor, value, fetched = deferred()
        expected = operation(value.clone())
        made = operation(tensor)
        assert str(made) == str(expected)
        operation(tensor)
        assert fetched == [1]


def test_inference_mode() -> None:
    with torch.inference_mode():
        tensor, value, _ = deferred()
        assert torch.equal(tensor * 2, value * 2)
