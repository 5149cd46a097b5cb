"""Which errors are particular to running on several ranks?"""

from __future__ import annotations

from ..errors import SamovarError, SettingError


class ShardingError(SamovarError, RuntimeError):
    """A sharded forward that would have given a wrong result."""


class StrategyError(SettingError):
    """An attention that the chosen strategy cannot compute."""


class RankError(SamovarError, RuntimeError):
    """A rank that failed or died, and with it the whole group."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str]]:
        return type(self), (self.rank, str(self))
