"""The same on a GPU: copies beside computing, pinning in place, and bits. Run by `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

import zoo
from samovar.core.errors import SettingError
from samovar.hooks import running
from samovar.offload import OffloadConfig, apply_offload
from samovar.offload.cuda import CudaStage
from samovar.offload.files import Source, Unpinned
from samovar.offload.host import new_chunk
from samovar.offload.weights import LEAST_PIECE

CASES = {case.id: case for case in zoo.load()}


def test_without_a_gpu_it_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SettingError, match=r"device='cuda' cannot be used: .*finds no GPU here"):
        CudaStage(torch.device("cuda"))


@pytest.mark.gpu
def test_a_range_is_pinned_in_place_and_an_error_is_not_left_behind() -> None:
    stage = CudaStage(torch.device("cuda"))
    tensor = new_chunk(LEAST_PIECE)
    assert stage.register(tensor.data_ptr(), LEAST_PIECE) is None
    assert tensor.is_pinned()
    assert stage.register(tensor.data_ptr(), LEAST_PIECE) is not None
    torch.zeros(4, device="cuda").add_(1)  # Would raise what CUDA remembers.
    stage.unregister(tensor.data_ptr())
    assert stage.measure_bus() > 2**30


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "WanTransformer3DModel"])
def test_the_bits_are_those_of_the_resident_model(name: str) -> None:
    class Holder:
        transformer: torch.nn.Module

    case = CASES[name]
    holder = Holder()
    model = holder.transformer = case.build()

    def run(step: int) -> torch.Tensor:
        inputs = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in case.inputs(step).items()}
        with torch.no_grad():
            output = model(**inputs, return_dict=False)[0]
        return output.cpu()

    model.to("cuda")
    expected = [run(step) for step in range(3)]
    model.to("cpu")
    offloaded = apply_offload(holder, OffloadConfig("layerwise", device="cuda"))
    with running(holder):
        assert all(torch.equal(run(step), expected[step]) for step in range(3))
    offloaded.detach()
    assert all(tensor.device.type == "cpu" for tensor in model.parameters())
    model.to("cuda")
    assert torch.equal(run(0), expected[0])


@pytest.mark.gpu
def test_nobody_elses_memory_is_pinned() -> None:
    """Tensors that lie between weights on the heap can be copied while those are offloaded, and after."""

    class Holder:
        def __init__(self, transformer: torch.nn.Module, text_encoder: torch.nn.Module) -> None:
            self.transformer, self.text_encoder = transformer, text_encoder

    model = CASES["FluxTransformer2DModel"].build()
    between = []
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        between.append(torch.arange(512))
    holder = Holder(model, torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8))))
    for _ in range(2):
        offloaded = apply_offload(holder, OffloadConfig("model", device="cuda"))
        assert all(torch.equal(tensor.to("cuda").cpu(), torch.arange(512)) for tensor in between)
        offloaded.detach()
        assert all(torch.equal(tensor.to("cuda").cpu(), torch.arange(512)) for tensor in between)


@pytest.mark.gpu
def test_what_is_not_pinned_passes_through_buffers_in_order_with_what_is() -> None:
    """Many more bytes than the buffers hold, to and fro between pinned and not, each read back where it belongs."""
    stage = CudaStage(torch.device("cuda"))
    buffers = [new_chunk(2**20) for _ in range(3)]
    for buffer in buffers:
        assert stage.register(buffer.data_ptr(), buffer.numel()) is None
    stage.pass_through(buffers)
    contents = [torch.randint(256, (5 * 2**20 + 7,), dtype=torch.uint8) for _ in range(6)]
    memory = stage.allocate(sum(content.numel() for content in contents))
    offset = 0
    for index, content in enumerate(contents):
        source = content.pin_memory() if index % 2 else Unpinned(content.numel(), ((0, Source(content)),))
        stage.send(memory, offset, source)
        offset += content.numel()
    stage.compute_waits(stage.mark_copied())
    assert torch.equal(memory.flat[:offset].cpu(), torch.cat(contents))
    stage.free(memory)
    stage.pass_through(())
    stage.synchronize()
    for buffer in buffers:
        stage.unregister(buffer.data_ptr())
