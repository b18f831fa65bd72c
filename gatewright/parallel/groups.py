"""The pool of process groups that share documents: made once, at the start, in one order on every rank, and no more.

A group is aligned: ranks [k · size, (k + 1) · size), for each size that divides the ranks. There is one of each size
that a rank belongs to, and that of all ranks is the world. They end with the process group.
"""

import torch
import torch.distributed as dist


def aligned_sizes(ranks: int) -> list[int]:
    """Sizes of groups that share documents, ascending: the divisors of the number of ranks but 1."""
    return [size for size in range(2, ranks + 1) if ranks % size == 0]


class GroupPool:
    """This rank's aligned groups, by size."""

    def __init__(self, *, rank: int, ranks: int, device: torch.device) -> None:
        """All ranks must come here at the same time. Each group makes one sum, so that its connections are there."""
        self._by_size: dict[int, dist.ProcessGroup] = {}
        for size in aligned_sizes(ranks):
            for first in range(0, ranks, size):
                # Every rank makes every group, members or not, as torch demands.
                group = dist.group.WORLD if size == ranks else dist.new_group(list(range(first, first + size)))
                if first <= rank < first + size:
                    assert group is not None
                    self._by_size[size] = group
        for group in self._by_size.values():
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    @property
    def sizes(self) -> list[int]:
        return list(self._by_size)

    def of(self, size: int) -> dist.ProcessGroup:
        """The group of this size that this rank belongs to."""
        return self._by_size[size]
