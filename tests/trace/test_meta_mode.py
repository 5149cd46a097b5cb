"""Without weights, a forward gives the forms of the real one and takes its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional

import zoo
from samovar.arch.modules import parameters_of
from samovar.core import nested
from samovar.trace.meta_mode import MetaCopier, MetaMode, with_few_values

CASES = {case.id: case for case in zoo.load()}
UNSERVED = {"HiDreamImageTransformer2DModel": "bincount"}
"""Models whose forward depends on what the weights compute: how many tokens go to which expert. May only shrink."""
SOME = [case for case in CASES.values() if case.id not in UNSERVED][::10]


def peak(run: Callable[[], Any]) -> int:
    with MetaMode() as mode:
        run()
    return mode.peaks[""]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_memory_is_counted_while_it_is_held() -> None:
    x = meta(256, 256)  # 256 KiB, made outside.
    with MetaMode() as mode:
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
        assert mode.peaks[""] == 2**18
        assert x.view(-1).shape == (2**16,)
        assert mode.num_bytes == 0, "a view of what was there before makes nothing"


def test_attention_makes_no_matrix_of_all_pairs() -> None:
    query = meta(1, 4, 4096, 64)
    one = query.nbytes
    assert peak(lambda: functional.scaled_dot_product_attention(query, query, query)) == one
    joined = peak(lambda: functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2))
    assert joined == one, "heads are joined without a copy"


def test_values_that_no_weight_touched_are_kept() -> None:
    hidden = meta(2, 5, 8)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    with torch.no_grad(), MetaMode():
        moved = mask.to(hidden.device)
        assert moved.bool().sum().item() == 7
        assert hidden[moved.bool()].shape == (7, 8)
        assert (hidden * moved.unsqueeze(-1)).is_meta
        assert torch.arange(4, device=hidden.device).tolist() == [0, 1, 2, 3]
        assert hidden.to("cpu").is_meta, "there is nothing to move"
        with pytest.raises(RuntimeError, match="meta"):
            hidden.sum().item()


def test_a_twin_shares_no_tensor_and_holds_no_memory() -> None:
    model = CASES["FluxTransformer2DModel"].build()
    twin = MetaCopier().copy(model)
    assert type(twin).__name__ == "FluxTransformer2DModel"
    assert all(parameter.is_meta for parameter in twin.parameters())
    assert not {id(t) for t in nested.tensors(list(model.buffers()))} & {id(t) for t in twin.buffers()}
    assert not any(parameter.is_meta for parameter in model.parameters())


def forms(output: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in nested.tensors(output)]


@pytest.mark.parametrize("name", [*list(CASES)[::10], *UNSERVED])
def test_models_run_without_weights_or_say_why_not(name: str) -> None:
    case = CASES[name]
    model, inputs = case.build(), nested.map_tensors(with_few_values, case.inputs(0))
    plain = {"return_dict": False} if "return_dict" in parameters_of(model) else {}
    refused = pytest.raises(NotImplementedError, match=UNSERVED[name]) if name in UNSERVED else nullcontext()
    expected = forms(case.run(model))
    with refused, torch.no_grad(), torch.compiler.set_stance("force_eager"), MetaMode() as mode:
        assert forms(MetaCopier().copy(model)(**inputs, **plain)) == expected
        assert mode.peaks[""] > 0


def test_a_quantised_or_cast_layer_makes_the_weight_that_it_computes_with() -> None:
    layer = torch.nn.Linear(256, 128, bias=False)
    (torchao := pytest.importorskip("torchao.quantization")).quantize_(layer, torchao.Int8WeightOnlyConfig())
    cast = pytest.importorskip("diffusers.hooks").apply_layerwise_casting
    plain = torch.nn.Sequential(torch.nn.Linear(256, 128, bias=False))
    cast(plain, storage_dtype=torch.float16, compute_dtype=torch.float32)
    for model in (layer, plain):
        twin, given = MetaCopier().copy(model), meta(2, 256)
        with torch.no_grad():
            assert peak(lambda twin=twin, given=given: twin(given)) == 4 * (256 * 128 + 2 * 128)


def test_a_mask_of_each_token_for_each_loses_its_values() -> None:
    """Gigabytes of values would be computed for minutes, where nobody asks for one of them."""
    mask = torch.arange(2**13) % 3 > 0
    with MetaMode() as mode:
        pairs = mask.view(1, -1).repeat(2**13, 1)
        assert pairs.is_meta
        assert (pairs.shape, pairs.dtype, mode.num_bytes) == ((2**13, 2**13), torch.bool, 2**26)
        both = pairs & pairs.t()
        assert (both.shape, mode.num_bytes) == ((2**13, 2**13), 2**27)
        both[5, :7] = True
        assert mode.peaks[""] == 2**27, "nothing is set where there are no values"
        fewer = mask[:300].view(1, -1).repeat(300, 1)
        assert int(fewer.sum()) == 300 * 200
        assert mask.nonzero().shape == (int(mask.sum()), 1), "how many there are is in the values"
