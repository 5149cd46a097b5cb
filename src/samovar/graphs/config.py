"""The settings of graphs."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.settings import Settings, count, kind, setting


@dataclass(frozen=True)
class GraphsConfig(Settings, param="compile"):
    """The settings of `compile="graphs"`."""

    max_graphs: int = setting(
        16,
        count(1),
        "Most graphs that are kept of each denoiser: one for each form of input, such as an image's size and a text's "
        "length. What comes in other forms runs without graphs.",
    )
    compare_every: int = setting(
        256,
        count(1),
        "Every N replays of a denoiser its forward runs as well, and the bits are compared: other bits turn "
        "graphs off. 1 compares each.",
    )
    blocks: bool | str = setting(
        False,
        kind("True, False or the name of a backend", lambda value: isinstance(value, (bool, str))),
        "Whether blocks are compiled as well, so that the graphs are of compiled blocks: True, or the name of a "
        "backend of torch.compile. This changes bits, as compilers do.",
    )
