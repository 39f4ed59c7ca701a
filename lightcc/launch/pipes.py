"""The pipes of a process that was started with them, which subprocess's types do not tell."""
from typing import IO, Optional


def piped(pipe: Optional[IO[bytes]]) -> IO[bytes]:
    """process.stdin, stdout or stderr, where subprocess.PIPE was asked for."""
    assert pipe is not None
    return pipe
