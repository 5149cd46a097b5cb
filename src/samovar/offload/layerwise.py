"""How do blocks stream? A hook on each: its weights are there when it is called, and gone when it returns.

Between calls the parameters of a streamed block lie on the host, so `state_dict`, adapters and all that looks at
them outside a call see the one true copy. A block that is bypassed, as by a cache, is not seen here at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import SettingError
from ..hooks import HookOrder, ModelHook
from ..other_libraries import compiled_call
from .parcels import Parcel
from .ring import Ring, RingStats
from .staging import Buffer, Stage


class BlockStream:
    """The blocks of one component that stream, and the ring through which they do."""

    def __init__(
        self,
        stage: Stage,
        blocks: Sequence[Parcel],
        ring_bytes: int,
        goes_round: Callable[[], bool],
        stats: RingStats | None = None,
    ) -> None:
        """`goes_round` says whether there will be a next pass; `stats` is added to."""
        self._stage, self._blocks, self._ring_bytes, self._goes_round = stage, list(blocks), ring_bytes, goes_round
        self._ring: Ring | None = None
        self._buffer: Buffer | None = None
        self.stats = stats or RingStats()
        self._order: list[Parcel] = self._blocks

    @property
    def on_device(self) -> list[str]:
        """The blocks that are on the device or on their way."""
        return [] if self._ring is None else [cargo.name for cargo in self._ring.cargoes if isinstance(cargo, Parcel)]

    def open(self) -> None:
        """Take the ring's memory."""
        if self._ring is None:
            self._buffer = self._stage.allocate(self._ring_bytes)
            self._aim(self._buffer)
            self._ring = Ring(self._stage, self._ring_bytes, self._order, goes_round=self._goes_round, grow=self._grow)
            self._ring.stats = self.stats

    def close(self) -> None:
        """Give the ring's memory back; the order that was learned is kept."""
        if self._ring is not None and self._buffer is not None:
            self._order = [cargo for cargo in self._ring.order if isinstance(cargo, Parcel)]
            self._ring.drop()
            self._ring = None
            self._aim(None)
            self._stage.free(self._buffer)
            self._buffer = None

    def begin_pass(self) -> None:
        """The model is called."""
        if self._ring is not None:
            self._ring.begin_pass()

    def end_pass(self) -> None:
        """The model returns or fails."""
        if self._ring is not None:
            self._ring.end_pass()

    def drop(self) -> None:
        """Forget what was sent ahead: weights may have changed since."""
        if self._ring is not None:
            self._ring.drop()

    def acquire(self, block: Parcel) -> None:
        """Bring a block in; what is computed from now on finds it there."""
        assert self._ring is not None
        self._stage.check_call()
        offsets = self._ring.acquire(block)
        assert self._buffer is not None
        block.place(offsets, self._buffer)

    def release(self, block: Parcel) -> None:
        """Let a block go."""
        block.withdraw()
        if self._ring is not None:
            self._ring.release()

    def _grow(self, num_bytes: int) -> None:
        """A block has grown, by an adapter for instance."""
        assert self._buffer is not None
        self._stage.free(self._buffer)
        self._ring_bytes = num_bytes
        self._buffer = self._stage.allocate(num_bytes)
        self._aim(self._buffer)

    def _aim(self, buffer: Buffer | None) -> None:
        for block in self._blocks:
            block.target = buffer


class StreamHook(ModelHook):
    """Brings a block's weights in before its call and lets them go after it."""

    order = HookOrder.OFFLOAD

    def __init__(self, stream: BlockStream, block: Parcel, enter: Callable[[], None]) -> None:
        """`enter` makes sure that the component is on the device, whoever calls the block."""
        self._stream, self._block, self._enter = stream, block, enter

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._enter()
        self._stream.acquire(self._block)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._stream.release(self._block)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self._stream.release(self._block)


def check_compiled(name: str, module: torch.nn.Module) -> None:
    """Refuse blocks that are compiled into CUDA graphs: these keep the addresses of their weights."""
    for compiled in (compiled_call(module), module):
        read = getattr(compiled, "get_compiler_config", None)
        config = read() if read is not None else None
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            raise SettingError(
                f"{name} is compiled with CUDA graphs, which keep the addresses of its weights: it cannot be "
                'offloaded. Compile it with mode="default" or "max-autotune-no-cudagraphs".'
            )
