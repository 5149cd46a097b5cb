"""Without weights, a forward gives the forms of the real one and takes its memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import zoo
from samovar.arch.modules import parameters_of
from samovar.core import nested
from samovar.trace import weightless as module
from samovar.trace.rehearse import quiet
from samovar.trace.weightless import running_weightless, weightless_twin, with_few_values

CASES = {case.id: case for case in zoo.load()}
UNSERVED = {"HiDreamImageTransformer2DModel": "bincount"}
"""Models whose forward depends on what the weights compute: how many tokens go to which expert. May only shrink."""
SOME = [case for case in CASES.values() if case.id not in UNSERVED][::10]


def peak(run: Callable[[], Any]) -> int:
    with running_weightless() as mode:
        run()
    return mode.peak_bytes


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_memory_is_counted_while_it_is_held() -> None:
    x = meta(256, 256)  # 256 KiB, made outside.
    with running_weightless() as mode:
        y = x + 1
        assert mode.num_bytes == 2**18
        z = y.view(-1)[:4].unsqueeze(0)
        y.add_(1).mul_(2)
        assert mode.num_bytes == 2**18, "views and in-place operations make nothing"
        del y
        assert mode.num_bytes == 2**18, "a view keeps all of it"
        del z
        assert mode.num_bytes == 0
        x.t().reshape(-1)
        assert mode.peak_bytes == 2**18
        assert x.view(-1).shape == (2**16,)
        assert mode.num_bytes == 0, "a view of what was there before makes nothing"


def test_small_allocations_take_a_whole_unit() -> None:
    x = meta(3)
    assert peak(lambda: x + 1) == 512


ALIKE: list[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = [
    (torch.add, (meta(4, 6), 1)),
    (torch.add, (meta(4, 6, dtype=torch.int64), 1)),
    (torch.add, (meta(4, 6, dtype=torch.int64), 1.0)),
    (torch.add, (meta(4, 6, dtype=torch.bool), True)),
    (torch.add, (meta(4, 6, dtype=torch.bool), 1)),
    (torch.add, (meta(6, 4).t(), 1)),
    (torch.add, (meta(4, 6), meta(6))),
    (torch.add, (meta(4, 6), meta(6, dtype=torch.float64))),
    (torch.cat, ([meta(4, 6), meta(4, 6)],)),
    (torch.cat, ([meta(4, 6), meta(4, 6)], 1)),
    (torch.cat, ([meta(4, 6), meta(3, 6)],)),
    (torch.sum, (meta(4, 6), 0)),
    (torch.sum, (meta(4, 6), 0, True)),
    (torch.empty_like, (meta(6, 4).t(),)),
]
"""Operations that differ from their neighbours in one thing, on which the form of the output depends."""


def test_what_was_made_before_is_made_again_and_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, forms, run = [], [form_of(func(*args)) for func, args in ALIKE], module._run
    monkeypatch.setattr(module, "_run", lambda func, *given: [ran.append(func), run(func, *given)][1])
    assert len(set(forms)) > len(forms) / 2, "they do differ"
    with running_weightless() as mode:
        for repetition in range(3):
            kept = [func(*args) for func, args in ALIKE]
            assert [form_of(made) for made in kept] == forms
            assert len({made.untyped_storage()._cdata for made in kept}) == len(ALIKE)
            assert mode.num_bytes == 512 * len(ALIKE), "each has memory of its own"
            del kept
            assert len(ran) == len(ALIKE), f"repetition {repetition} asks torch once for each"


def form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def test_attention_makes_no_matrix_of_all_pairs() -> None:
    query = meta(1, 4, 4096, 64)
    one = query.nbytes
    assert peak(lambda: functional.scaled_dot_product_attention(query, query, query)) == one
    joined = peak(lambda: functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2))
    assert joined == one, "heads are joined without a copy"


def test_values_that_no_weight_touched_are_kept() -> None:
    hidden = meta(2, 5, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    with running_weightless():
        moved = mask.to(hidden.device)
        assert moved.bool().sum().item() == 7
        assert hidden[moved.bool()].shape == (7, 8)
        assert (hidden * moved.unsqueeze(-1)).is_meta
        assert torch.arange(4, device=hidden.device).tolist() == [0, 1, 2, 3]
        assert hidden.to("cpu").is_meta, "there is nothing to move"
        with pytest.raises(RuntimeError, match="meta"):
            hidden.sum().item()


def test_writing_what_is_unknown_into_what_is_known_keeps_the_form() -> None:
    known = torch.zeros(3, 4)
    with running_weightless():
        known[:2] = meta(2, 4)
        known += meta(4)
    assert known.shape == (3, 4)


def test_a_twin_shares_no_tensor_and_holds_no_memory() -> None:
    model = CASES["FluxTransformer2DModel"].build()
    twin = weightless_twin(model)
    assert type(twin).__name__ == "FluxTransformer2DModel"
    assert all(parameter.is_meta for parameter in twin.parameters())
    assert not {id(t) for t in nested.tensors(list(model.buffers()))} & {id(t) for t in twin.buffers()}
    assert not any(parameter.is_meta for parameter in model.parameters())


def without_weights(case: zoo.Case, model: torch.nn.Module) -> tuple[Any, int]:
    """What a model's twin returns, and the most memory that it took."""
    inputs = nested.map_tensors(with_few_values, case.inputs(0))
    plain = {"return_dict": False} if "return_dict" in parameters_of(model) else {}
    with quiet(), torch.compiler.set_stance("force_eager"), running_weightless() as mode:
        return weightless_twin(model)(**inputs, **plain), mode.peak_bytes


def forms(output: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in nested.tensors(output)]


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.id)
def test_models_run_without_weights(case: zoo.Case) -> None:
    model = case.build()
    output, peak_bytes = without_weights(case, model)
    assert forms(output) == forms(case.run(model))
    assert peak_bytes > 0


@pytest.mark.parametrize("name", UNSERVED)
def test_what_cannot_be_run_says_why(name: str) -> None:
    with pytest.raises(NotImplementedError, match=UNSERVED[name]):
        without_weights(CASES[name], CASES[name].build())


def test_a_mask_of_each_token_for_each_loses_its_values() -> None:
    """Gigabytes of values would be computed for minutes, where nobody asks for one of them."""
    mask = torch.arange(2**13) % 3 > 0
    with running_weightless() as mode:
        pairs = mask.view(1, -1).repeat(2**13, 1)
        assert pairs.is_meta
        assert (pairs.shape, pairs.dtype, mode.num_bytes) == ((2**13, 2**13), torch.bool, 2**26)
        both = pairs & pairs.t()
        assert (both.shape, mode.num_bytes) == ((2**13, 2**13), 2**27)
        both[5, :7] = True
        assert mode.peak_bytes == 2**27, "nothing is set where there are no values"
        fewer = mask[:300].view(1, -1).repeat(300, 1)
        assert int(fewer.sum()) == 300 * 200
        assert mask.nonzero().shape == (int(mask.sum()), 1), "how many there are is in the values"
