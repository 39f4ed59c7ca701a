"""What run() returns or raises after an elastic job."""
from typing import Any

from lightcc.elastic.driver import ElasticOutcome
from lightcc.launch import results
from lightcc.launch.run_files import RunFiles


def values(outcome: ElasticOutcome, count: int, run_files: RunFiles) -> list[Any]:
    """The results of the first `count` ranks of the last epoch, in their order. A job that never had one has workers in
    the order of their start instead. Raises RuntimeError if there are not all, KeyboardInterrupt after Ctrl-C."""
    results.check_interrupt(outcome)
    if outcome.cause:
        error = results.raised_first(outcome.ends, run_files)
        raise RuntimeError(f"run: {outcome.text}" + (
            f"\n\n{outcome.ends[error.rank].name} raised an exception\n\n{error.traceback}" if error else ""))
    numbers = outcome.members or sorted(outcome.ends)
    return [_value(rank, number, outcome, run_files) for rank, number in enumerate(numbers[:count])]


def _value(rank: int, number: int, outcome: ElasticOutcome, run_files: RunFiles) -> Any:
    end = outcome.ends[number]
    name = f"{end.name}, rank {rank}," if outcome.members else end.name
    if end.code == 0 and not end.dismissed:
        return results.value(number, name, run_files)
    how = "was in init() for another world" if end.dismissed else end.how
    error = results.raised(number, run_files)
    raise RuntimeError(f"run: {name} {how}, so it has no result; the job ended well, since another worker returned"
                       + (f"\n\n{error.traceback}" if error else ""))
