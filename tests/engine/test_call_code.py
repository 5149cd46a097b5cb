"""What the code of a pipeline says about its inputs, where the signature does not."""

from __future__ import annotations

import diffusers

from samovar.engine.call_code import CallCode


def test_an_input_that_the_code_compares_with_none_can_be_left_out() -> None:
    painter = CallCode.of(diffusers.FluxInpaintPipeline, ("image", "mask_image"))
    assert painter is not None
    assert not painter.does_without("image")
    vace = CallCode.of(diffusers.WanVACEPipeline, ("video", "mask", "reference_images"))
    assert vace is not None
    assert vace.does_without("video")
