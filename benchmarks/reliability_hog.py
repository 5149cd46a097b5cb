"""A process that takes all memory of the GPU but some bytes, until its input ends.

python benchmarks/reliability_hog.py BYTES_TO_LEAVE
"""

from __future__ import annotations

import sys

import torch

GRAIN = 2 * 2**20  # The least that a GPU hands out.


def main(to_leave: int) -> None:
    held = []
    while (spare := (torch.cuda.mem_get_info()[0] - to_leave) // GRAIN * GRAIN) > 0:
        held.append(torch.empty(spare, dtype=torch.uint8, device="cuda"))
    print(sum(block.numel() for block in held), torch.cuda.mem_get_info()[0], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
