"""The settings of graphs."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.graphs import GraphsConfig


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "8", None])
def test_a_limit_is_a_whole_number(number: Any) -> None:
    with pytest.raises(SettingError, match="expected a whole number") as caught:
        GraphsConfig(max_graphs=number)
    assert caught.value.param == "max_graphs"
