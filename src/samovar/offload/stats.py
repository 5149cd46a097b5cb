"""What was done since the offload was attached."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .sizes import format_bytes


@dataclass
class TimeStats:
    """What was computed ahead of the steps for the time-only layers of a component."""

    layers: int = 0
    num_bytes: int = 0
    """Their weights, on the host."""
    computed_steps: int = 0
    found_forwards: int = 0
    """Forwards that found their outputs."""
    live_calls: int = 0
    """Calls of layers whose weights were brought in for the call."""

    def __str__(self) -> str:
        return (
            f"{self.layers} layers ({format_bytes(self.num_bytes)}) that see time alone: {self.computed_steps} steps "
            f"computed ahead, {self.found_forwards} forwards found theirs, {self.live_calls} calls computed on the spot"
        )


@dataclass
class OffloadStats:
    """Totals since the offload was attached."""

    sent_bytes: int = 0
    """Bytes copied to the device."""
    coded_bytes: int = 0
    """Of these, bytes of coded weights."""
    decoded_bytes: int = 0
    """What they were decoded to."""
    block_loads: int = 0
    late_blocks: int = 0
    """Blocks whose copy had not been started when they were called."""
    dropped_blocks: int = 0
    """Blocks that were copied ahead and not used."""
    component_loads: dict[str, int] = field(default_factory=dict)
    """How often each component was brought to the device."""
    held_bytes: int = 0
    """Device memory that our copies of weights take now."""
    peak_held_bytes: int = 0
    peak_reserved_bytes: int = 0
    """The most that torch's allocator held of a GPU, for everything, as far as it was counted."""
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    """Bytes of the host copy that could not be pinned."""
    copied_bytes: int = 0
    """Bytes copied on the host in order to be pinned; the rest is pinned in place."""
    setup_s: float = 0.0
    ahead: dict[str, TimeStats] = field(default_factory=dict)
    """By component: what was computed ahead of the steps."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        sent, held = format_bytes(self.sent_bytes), format_bytes(self.peak_held_bytes)
        if self.coded_bytes:
            sent += f" for {format_bytes(self.sent_bytes - self.coded_bytes + self.decoded_bytes)} of weights"
        late = f", {self.late_blocks} of them late" if self.late_blocks else ""
        return (
            f"{sent} sent in {self.block_loads} block loads{late}; at most {held} of weights on the device; "
            f"{self.setup_s:.1f} s to set up" + "".join(f"; {name}: {layers}" for name, layers in self.ahead.items())
        )
