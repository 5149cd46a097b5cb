"""What has an offload done so far?"""

from __future__ import annotations

from dataclasses import dataclass, field

from .sizes import format_bytes


@dataclass
class OffloadStats:
    """Totals since the offload was attached."""

    sent_bytes: int = 0
    """Bytes of weights copied to the device."""
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
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    """Bytes of the host copy that could not be pinned."""
    copied_bytes: int = 0
    """Bytes copied on the host in order to be pinned; the rest is pinned in place."""
    setup_s: float = 0.0

    def __str__(self) -> str:
        sent, held = format_bytes(self.sent_bytes), format_bytes(self.peak_held_bytes)
        late = f", {self.late_blocks} of them late" if self.late_blocks else ""
        return (
            f"{sent} sent in {self.block_loads} block loads{late}; at most {held} of weights on the device; "
            f"{self.setup_s:.1f} s to set up"
        )
