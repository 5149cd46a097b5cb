"""Which settings do graphs take?"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import SettingError


@dataclass(frozen=True)
class GraphsConfig:
    """The settings of `compile="graphs"`."""

    max_graphs: int = 16
    """Most graphs that are kept of each denoiser: one for each form of input, such as an image's size and a text's
    length. What comes in other forms runs without graphs."""
    blocks: bool | str = False
    """Whether blocks are compiled as well, so that the graphs are of compiled blocks: True, or the name of a backend of
    torch.compile. This changes bits, as compilers do."""

    def __post_init__(self) -> None:
        if type(self.max_graphs) is not int or self.max_graphs < 1:
            raise SettingError(
                f"max_graphs={self.max_graphs!r}; expected a whole number, 1 or more. To capture nothing, leave out "
                "compile.",
                param="max_graphs",
            )
        if not isinstance(self.blocks, (bool, str)):
            raise SettingError(f"blocks={self.blocks!r}; expected True, False or a backend's name.", param="blocks")
