"""Reading, checking and describing what everything else is made of."""

__all__: list[str] = []
