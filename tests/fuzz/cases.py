"""The cases that are tried, for how long, and what remains of one that fails."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

OUT = Path(__file__).parents[2] / "out" / "fuzz"
TARGETS = ("framing", "forms", "pictures", "folders", "settings", "bodies")
"""Each gets its share of the time."""


class Fuzz:
    """The cases of one target, and how they ended."""

    def __init__(self, target: str, num_cases: int | None) -> None:
        """A fixed number of cases, always the same; None for as many as there is time for."""
        self.target, self._num_cases = target, num_cases
        self.ends: Counter[str] = Counter()
        environment = os.environ if num_cases is None else {}
        self.seed = int(environment.get("FUZZ_SEED", random.SystemRandom().randrange(2**32) if environment else 0))
        self._only = environment.get("FUZZ_CASE")
        self._seconds = float(environment.get("FUZZ_SECONDS", 300)) / len(TARGETS)
        self._number = self._tried = 0

    def cases(self) -> Iterator[random.Random]:
        """The random numbers of each case."""
        ends_at = time.monotonic() + self._seconds
        first = 0 if self._only is None else int(self._only)
        for self._number in range(first, 2**62):
            if self._number - first == (1 if self._only is not None else self._num_cases):
                return
            if self._num_cases is None and time.monotonic() > ends_at:
                return
            self._tried += 1
            yield random.Random(f"{self.target} {self.seed} {self._number}")

    @contextlib.contextmanager
    def trying(self, data: bytes, suffix: str = "bin") -> Iterator[None]:
        """Keep the input if what is done with it fails, and say how to make it again."""
        try:
            yield
        except BaseException as error:
            OUT.mkdir(parents=True, exist_ok=True)
            file = OUT / f"{self.target}-{self.seed}-{self._number}.{suffix}"
            file.write_bytes(data)
            again = f"FUZZ_SEED={self.seed} FUZZ_CASE={self._number} make test-fuzz ARGS='-k {self.target}'"
            raise AssertionError(f"{type(error).__name__}: {error}\nThe input is in {file}. Again: {again}") from error

    def counts(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items(), key=lambda item: -item[1]))
        return f"fuzz {self.target}: {self._tried} cases from seed {self.seed}: {ends}"


def fuzzed(target: str, num_cases: int) -> pytest.MarkDecorator:
    """Parametrize a test by the cases of a target: some, in every run, and those of `make test-fuzz`."""
    assert target in TARGETS
    some = pytest.param((target, num_cases), id=f"{target}, {num_cases} cases")
    many = pytest.param((target, None), id=target, marks=pytest.mark.fuzz)
    return pytest.mark.parametrize("fuzz", [some, many], indirect=True)
