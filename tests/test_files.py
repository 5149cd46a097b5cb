"""Files of a model: read, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.errors import ModelError
from samovar.files import read_json


def test_an_object_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"näme": "é"}', encoding="utf-8")
    assert read_json(file) == {"näme": "é"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"", "is not valid"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        read_json(file)
    assert str(file) in str(caught.value)
