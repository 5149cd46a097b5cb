"""Code is followed as if an argument were None."""

from __future__ import annotations

import ast

import pytest

from samovar.engine.without_argument import fails_without


@pytest.mark.parametrize(
    ("body", "fails"),
    [
        ("if image is None: raise ValueError", True),
        ("if image is None and image_latents is None: raise ValueError", True),
        ("if image is None and video is None: raise ValueError", False),
        ("if image is None and height is None: raise ValueError", False),
        ("if other: raise ValueError", False),
        ("size = image.size", True),
        ("size = image[0].size if isinstance(image, list) else image.size", True),
        ("size = image.size if image is not None else 3", False),
        ("if image is not None and image.size > 3: pass", False),
        ("if not isinstance(image, str) or image.size: pass", False),
        ("if wanted and image.size: pass", False),
        ("image = image or blank()\nimage.size", False),
        ("if image is None: return\nimage.size", False),
        ("if image is None: image = blank()\nimage.size", False),
        ("if large: image.size\nelse: image.mode", True),
        ("if large: image = blank()\nimage.size", False),
        ("for frame in video: image.size", False),
        ("with torch.no_grad(): image.size", True),
        ("count = len(image)", True),
        ("names = [image.size for each in video]", False),
        ("self.check_inputs(image, height)", False),
        ("pixels = self.image_processor.preprocess(image, height)", True),
        ("video, mask = self.preprocess_conditions(image, mask)", False),
        ("if image is not None and image.ndim == 4: pixels = image\nelse: self.processor.preprocess(image)", True),
    ],
)
def test_whether_none_is_a_failure(body: str, fails: bool) -> None:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    (function,) = ast.parse(f"def call(self, image=None, **others):\n{lines}").body
    assert fails_without(function, "image") is fails
