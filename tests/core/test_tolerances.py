"""Tolerances by number and by name; anything else is refused with what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.core.tolerances import TOLERANCES, read_tolerance


def test_numbers_and_names() -> None:
    assert read_tolerance(0.03) == 0.03
    assert read_tolerance("0.03") == 0.03
    assert read_tolerance(0) == TOLERANCES["exact"] == read_tolerance("exact")
    assert 0 < read_tolerance("high") < read_tolerance("fast")


@pytest.mark.parametrize(
    ("value", "words"),
    [("fats", "Did you mean 'fast'"), (-1, "from 0 upwards"), (True, "from 0"), (None, "from 0"), (float("nan"), "0"),
     (float("inf"), "from 0"), ("-1", "from 0"), ("nan", "from 0")],
)  # fmt: skip
def test_what_is_none(value: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words) as refused:
        read_tolerance(value, "max_tolerance")
    assert refused.value.param == "max_tolerance"
