"""Models that Samovar has never seen: their originals, out of a folder of checkouts."""

from __future__ import annotations

import pytest

from . import Case, Missing, folder, load
from .checks import BACKENDS, CHECKS

pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]

RUNS = [
    pytest.param(case, check, backend, id="-".join(filter(None, (case.id, check, backend))))
    for case in load()
    for check, (_, by_backend) in CHECKS.items()
    for backend in (BACKENDS if by_backend else ("",))
]


@pytest.mark.parametrize(("case", "check", "backend"), RUNS)
def test_foreign(case: Case, check: str, backend: str) -> None:
    if folder() is None:
        pytest.skip("make test-foreign FOREIGN=folder: a folder of checkouts, each named owner+name, is needed")
    function, _ = CHECKS[check]
    try:
        with case.inside():
            function(case, *([backend] if backend else []))
    except Missing as missing:
        pytest.skip(str(missing))
