"""The files in memory (memfd_create) of one run() on one host: the function for its ranks, and a result file for each.
Only processes that inherit their descriptors can read or write them; they have no name in any folder, and the kernel
frees them with the last process that holds them.
"""

import os
from collections.abc import Iterable, Iterator


class RunFiles:
    """To be closed; `with` does it."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.function = -1  # a descriptor: sys.path, then function and arguments, as pickles
        self.results: dict[int, int] = {}  # by rank, descriptors of files as in result_file.py
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

    def close_function(self) -> None:
        """All ranks have it, and no more will come."""
        if self.function >= 0:
            os.close(self.function)
            self.function = -1

    def close_result(self, rank: int) -> None:
        os.close(self.results.pop(rank))

    def close(self) -> None:
        self.close_function()
        while self.results:
            os.close(self.results.popitem()[1])

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_chunks(fd: int, size: int) -> Iterator[bytes]:
    """All that is in a file, from its beginning."""
    begin = 0
    while chunk := os.pread(fd, size, begin):
        yield chunk
        begin += len(chunk)
