"""What run() returns or raises, from what its ranks have left in their result files."""
import signal
import socket
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, Optional

from lightcc.launch import result_file
from lightcc.launch.hosts import Place
from lightcc.launch.run_files import RunFiles
from lightcc.launch.termination import Cause, Outcome


class Raised(NamedTuple):
    """An exception that a rank has left."""

    time_s: float  # CLOCK_MONOTONIC
    rank: int
    traceback: str


def values(outcome: Outcome, places: Sequence[Place], run_files: RunFiles) -> list[Any]:
    """In rank order. Raises RuntimeError if there are not all, KeyboardInterrupt after Ctrl-C."""
    if outcome.cause:
        _fail(outcome, outcome.cause, places, run_files)
    return [value(place.rank, _named(place), run_files) for place in places]


def value(rank: int, name: str, run_files: RunFiles) -> Any:
    """What a rank that exited with 0 has returned. RuntimeError if there is nothing, or it cannot be unpickled."""
    memory = run_files.results[rank]
    found = result_file.read_header(memory)
    if found is None:
        raise RuntimeError(f"run: {name} exited with code 0 before the function returned, so it has no result")
    if found.is_error:  # and then something made it exit with code 0
        raise RuntimeError(f"run: {name} raised an exception\n\n{result_file.read_text(memory, found)}")
    try:
        result = result_file.read_value(memory, found)
    except Exception as error:
        raise RuntimeError(f"run: the result of {name} cannot be unpickled here: {error!r}") from error
    run_files.close_result(rank)  # the next one may be large as well
    return result


def raised_first(ranks: Iterable[int], run_files: RunFiles) -> Optional[Raised]:
    """By their own clocks: a rank that raised first may end last (frameworks take their time to unload)."""
    return min((error for rank in ranks if (error := raised(rank, run_files))), default=None)


def raised(rank: int, run_files: RunFiles) -> Optional[Raised]:
    memory = run_files.results[rank]
    found = result_file.read_header(memory)
    return Raised(found.time_s, rank, result_file.read_text(memory, found)) if found and found.is_error else None


def check_interrupt(outcome: Outcome) -> None:
    """Raises KeyboardInterrupt if it was that."""
    if outcome.cause and outcome.cause.rank is None and outcome.cause.code == -signal.SIGINT:
        raise KeyboardInterrupt


def _fail(outcome: Outcome, cause: Cause, places: Sequence[Place], run_files: RunFiles) -> NoReturn:
    check_interrupt(outcome)
    error = raised_first((place.rank for place in places), run_files) if cause.code > 0 else None
    if error and error.time_s > outcome.failed_at:  # it follows from a silent exit or the loss of a host
        error = None if cause.rank is None else raised(cause.rank, run_files)
    if error is None:
        raise RuntimeError(f"run: {outcome.text}")
    first = "" if error.rank == cause.rank else f"{_named(places[error.rank])} raised an exception; then "
    raise RuntimeError(f"run: {first}{outcome.text}\n\n{error.traceback}")


def _named(place: Place) -> str:
    if place.local_size == place.size and place.here:
        return f"rank {place.rank}"
    return f"rank {place.rank} (host {socket.gethostname() if place.here else place.host})"
