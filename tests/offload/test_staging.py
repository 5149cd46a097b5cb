"""What every device has in common: views of its memory, and calls that it takes or refuses."""

from __future__ import annotations

import pytest
import torch

from samovar.core.errors import SettingError
from samovar.offload import HostStage
from samovar.offload.weights import ALIGNMENT

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_a_view_has_the_type_shape_and_strides_of_another(dtype: torch.dtype, inference: bool) -> None:
    like = torch.ones(3, 4).to(dtype).t()
    with torch.inference_mode(inference):
        buffer = HostStage().allocate(4 * ALIGNMENT)
    view = buffer.view(like, ALIGNMENT)
    assert (view.dtype, view.shape, view.stride()) == (like.dtype, like.shape, like.stride())
    assert view.data_ptr() == buffer.flat.data_ptr() + ALIGNMENT
    assert buffer.flat.data_ptr() % ALIGNMENT == 0
    assert not view.is_inference()


def test_gradients_are_refused() -> None:
    stage = HostStage()
    with pytest.raises(SettingError, match=r"torch\.no_grad\(\)"):
        stage.check_call()
    with torch.no_grad():
        stage.check_call()


def test_arguments_are_left_alone_where_the_device_is_the_host() -> None:
    arguments = (torch.zeros(1), {"mask": [torch.zeros(2)]})
    assert HostStage().to_device(arguments) is arguments


def test_a_range_of_a_buffer_is_looked_up_and_always_the_same_bytes() -> None:
    buffer = HostStage().allocate(100)
    first = buffer.range(10, 20)
    first.fill_(3)
    assert buffer.range(10, 20) is first
    assert torch.equal(buffer.flat[10:30], first)
    assert buffer.range(10, 21).numel() == 21
