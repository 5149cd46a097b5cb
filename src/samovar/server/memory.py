"""The budget of memory that clients may take: bodies that arrive, and images and answers that wait or are sent."""

from __future__ import annotations

from .errors import ApiError

_PART_OVERHEAD = 64
"""Of each piece of a body, however short."""
_SMALL_BODY = 2**21
"""Bodies up to this size have room of their own, which larger ones do not take."""


class Ledger:
    """Bytes that are held for clients."""

    def __init__(self, most: int, what: str) -> None:
        self.most, self.used, self.what = most, 0, what

    @property
    def is_tight(self) -> bool:
        return 2 * self.used > self.most

    def hold(self, amount: int = 0) -> Hold:
        """An entry for one request; ApiError if there is no room."""
        hold = Hold(self)
        hold.add(amount)
        return hold


class Hold:
    """What one request holds, until it is released."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self._held = ledger, 0

    def add(self, amount: int, *, is_small: bool = True) -> None:
        """Hold more; ApiError if there is no room. What is not small leaves a quarter for what is."""
        ledger = self.ledger
        if ledger.used + amount > (ledger.most if is_small else ledger.most * 3 // 4):
            message = (
                f"The server holds {ledger.what} of {ledger.used:,} bytes for others; its limit is {ledger.most:,}."
            )
            raise ApiError(f"{message} Try again.", None, "memory_full", 503, {"Retry-After": "1"})
        ledger.used += amount
        self._held += amount

    def add_part(self, part: bytes) -> None:
        """Hold a piece of a body."""
        amount = len(part) + _PART_OVERHEAD
        self.add(amount, is_small=self._held + amount <= _SMALL_BODY)

    def release(self) -> None:
        self.ledger.used -= self._held
        self._held = 0

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
