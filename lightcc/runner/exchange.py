"""The memory (memfd) through which a function of run() reaches the ranks of a host, and their results leave them. Only
those who inherit it can read or write it; it has no name and goes with the last process that holds it.
"""

import os
from collections.abc import Iterable, Iterator


class Exchange:
    """To be closed; `with` does it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.function = -1  # sys.path, then function and arguments, as pickles
        self.results: dict[int, int] = {}  # by rank, as record.py has them
        try:
            self.function = os.memfd_create("lightcc-function")
            for rank in ranks:
                self.add(rank)
        except OSError:
            self.close()
            raise

    def add(self, rank: int) -> None:
        self.results[rank] = os.memfd_create(f"lightcc-result-{rank}")

    def arguments(self, rank: int) -> list[str]:
        """For task.py, which this process starts."""
        return [str(os.getpid()), str(self.function), str(self.results[rank])]

    def descriptors(self, rank: int) -> tuple[int, int]:
        """Which the rank is to inherit."""
        return self.function, self.results[rank]

    def forget_function(self) -> None:
        """All ranks have it."""
        if self.function >= 0:
            os.close(self.function)
            self.function = -1

    def forget_result(self, rank: int) -> None:
        os.close(self.results.pop(rank))

    def close(self) -> None:
        self.forget_function()
        while self.results:
            os.close(self.results.popitem()[1])

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def chunks(fd: int, size: int) -> Iterator[bytes]:
    """All that is in a memory, from its begin."""
    begin = 0
    while chunk := os.pread(fd, size, begin):
        yield chunk
        begin += len(chunk)
