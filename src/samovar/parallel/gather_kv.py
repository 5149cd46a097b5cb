"""How is attention computed when every rank gets all keys and values?

The one that always works: any mask, any number of heads, any kernel. It sends (P - 1) / P of the keys and values
to each rank and holds all of them.
"""

from __future__ import annotations

import torch

from .attention import Attention
from .collectives import Group


def gathered_attention(attention: Attention, group: Group) -> torch.Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    kept = attention.replicated_keys
    if not sum(attention.key_counts):
        return attention.attend(attention.key, attention.value, attention.mask_of_own_rows(group.index))
    own = [attention.key[:, :, kept:], attention.value[:, :, kept:]]
    keys, values = group.gather_rows(own, attention.key_counts, dim=2)
    return attention.attend(
        torch.cat([attention.key[:, :, :kept], *keys], dim=2),
        torch.cat([attention.value[:, :, :kept], *values], dim=2),
        attention.mask_of_own_rows(group.index),
    )
