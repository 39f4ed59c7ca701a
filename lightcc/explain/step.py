"""Where the time of a training step went, by a timeline that rank 0 recorded (docs/timeline.md)."""

import collections
import json
import statistics
from typing import Any, NamedTuple, Optional

COMPUTE, WAIT, QUEUE, COPY, EXCHANGE = "nothing in flight", "waiting for a rank", "queue", "copies", "exchange"
# What counts where several go on at once, the first of them: an exchange that goes on hides a wait, not the other way.
_BY_WEIGHT = (EXCHANGE, COPY, QUEUE, WAIT)
_PARTS = {"QUEUE": QUEUE, "MEMCPY_IN_FUSION_BUFFER": COPY, "MEMCPY_OUT_FUSION_BUFFER": COPY, "MEMCPY": COPY}
_PHASES = ("LOCAL_REDUCESCATTER", "CROSS_ALLREDUCE", "CROSS_ALLGATHER", "COMPRESS", "DECOMPRESS", "LOCAL_ALLGATHER")
_WARM_UP = 3  # steps that are left out where there are more


class Step(NamedTuple):
    """A step; seconds. `parts` are of all its time, at every moment the one that counts most."""
    number: int                    # of those in the file, from 0
    count: int                     # steps in the file
    seconds: float
    parts: dict[str, float]        # by COMPUTE, WAIT, QUEUE, COPY, EXCHANGE
    exposed: float                 # from the last rank's last tensor being ready to the last result
    tensors: int
    collectives: int               # what was fused counts once
    nbytes: int
    last_rank: Optional[str]       # which others waited for most often, if there was a wait
    last_rank_share: float         # of the tensors
    algorithms: dict[str, int]     # how many tensors went which way
    phases: dict[str, float]       # of 2D, by name: how long each went on


class _Tensor:
    """What a file says of one tensor in one step, or of a bucket of several, in microseconds."""

    def __init__(self, begin: float):
        self.begin = begin
        self.count = 1
        self.ready: list[tuple[float, str]] = []   # when which rank
        self.agreed = self.end = begin
        self.parts: list[tuple[str, float, float]] = []
        self.nbytes, self.fused, self.algorithm = 0, 1, ""


def median_step(path: str) -> Step:
    """The step of median length in a timeline that json.load reads, without the first three where there are more.

    A step is what lies between two appearances of the tensors that appear most often. Raises ValueError for a file that
    is no timeline or has fewer than two steps; OSError if it cannot be read.
    """
    events = _events(path)
    rows, phases = _rows(events)
    if marks := _steps(events):
        return _median(path, marks, [bucket for row in rows.values() for bucket in row], phases)
    most = max((len(row) for row in rows.values()), default=0)
    if most < 2:
        raise ValueError(f"{path}: no tensor appears twice; record at least two steps (docs/timeline.md)")
    recurring = [row for row in rows.values() if len(row) == most]
    starts = [min(row[k].begin for row in recurring) for k in range(most)]
    number = _median_of(starts)
    tensors = [row[number] for row in recurring]
    return _account(number, most, starts[number], starts[number + 1], tensors, phases)


def _median(path: str, starts: list[float], buckets: list[_Tensor], phases: list[tuple[str, float, float]]) -> Step:
    """By the row of steps, which a timeline of buckets has."""
    number = _median_of(starts) if len(starts) > 1 else 0
    ours = [one for one in buckets if len(starts) > 1 and starts[number] <= one.begin < starts[number + 1]]
    if not ours:
        raise ValueError(f"{path}: it has no two steps; record at least two (docs/timeline.md)")
    return _account(number, len(starts), starts[number], starts[number + 1], ours, phases)


def _median_of(starts: list[float]) -> int:
    """Which step has the median length, of those that have an end."""
    lengths = [later - start for start, later in zip(starts, starts[1:])]
    counted = range(_WARM_UP, len(lengths)) if len(lengths) > _WARM_UP else range(len(lengths))
    median = statistics.median_low(lengths[k] for k in counted)
    return next(k for k in counted if lengths[k] == median)


def _events(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        try:
            events = json.loads(text)
        except json.JSONDecodeError:  # of a rank that was killed: the end is missing
            events = json.loads(text[:text.rfind("}") + 1] + "]")
        if not all(isinstance(event, dict) and "ph" in event for event in events):
            raise ValueError
    except (ValueError, TypeError):
        raise ValueError(f"{path}: this is no timeline; one is recorded with lightccrun --timeline-filename") from None
    return events


def _row_of(event: dict[str, Any]) -> tuple[Any, Any]:
    """A tensor's row is a process in Horovod's layout, a bucket's is a thread."""
    return event.get("pid"), event.get("tid")


def _steps(events: list[dict[str, Any]]) -> list[float]:
    """When each step began, if the timeline has a row of them."""
    return [float(event["ts"]) for event in events if event["ph"] == "B" and str(event.get("name")).startswith("STEP ")]


def _rows(events: list[dict[str, Any]]) -> tuple[dict[Any, list[_Tensor]], list[tuple[str, float, float]]]:
    """All appearances of each tensor in turn, and the slices of 2D's phases."""
    names = {_row_of(event): event["args"]["name"] for event in events
             if event["ph"] == "M" and event.get("name") in ("process_name", "thread_name")}
    rows: dict[Any, list[_Tensor]] = collections.defaultdict(list)
    phases: list[tuple[str, float, float]] = []
    begun: dict[tuple[Any, str], float] = {}
    for event in events:
        kind, row, name, now = event["ph"], _row_of(event), str(event.get("name")), float(event.get("ts", 0))
        if kind not in "BEX":
            continue
        if names.get(row) in _PHASES:
            if kind == "B":
                begun[row, name] = now
            elif kind == "E":
                phases.append((names[row], begun.pop((row, name), now), now))
        elif kind == "B":
            begun[row, name] = now
            if name.startswith("NEGOTIATE_"):
                rows[row].append(_Tensor(now))
            elif rows[row] and "bytes" in event.get("args", {}):
                rows[row][-1].nbytes = int(event["args"]["bytes"])
                rows[row][-1].fused = int(event["args"].get("fused_requests", 1))
                if "tensors" in event["args"]:
                    rows[row][-1].count, rows[row][-1].fused = rows[row][-1].fused, 1
        elif rows[row]:
            _add(rows[row][-1], kind, name, begun.pop((row, name), now), now)
    return rows, phases


def _add(tensor: _Tensor, kind: str, name: str, began: float, now: float) -> None:
    """A tick of a rank, or the end of a slice."""
    if kind == "X":
        tensor.ready.append((now, name))
    elif name.startswith("NEGOTIATE_"):
        tensor.agreed = now
    elif name.isupper() and name not in _PARTS:  # the collective itself: ALLREDUCE
        tensor.end = now
    else:
        tensor.parts.append((_PARTS.get(name, EXCHANGE), began, now))
        if name not in _PARTS:
            tensor.algorithm = name


def _account(number: int, count: int, begin: float, end: float, tensors: list[_Tensor],
             phases: list[tuple[str, float, float]]) -> Step:
    slices = [(WAIT, tensor.begin, tensor.agreed) for tensor in tensors]
    slices += [part for tensor in tensors for part in tensor.parts]
    parts = _partition(begin, end, slices)
    last = collections.Counter(rank for tensor in tensors if tensor.ready
                               for rank in [max(tensor.ready)[1]] * tensor.count)
    rank, times = last.most_common(1)[0] if last else (None, 0)
    all_ready = max(tensor.agreed for tensor in tensors)
    ran = collections.Counter(way for tensor in tensors if tensor.algorithm
                              for way in [tensor.algorithm] * tensor.count)
    count_of_tensors = sum(tensor.count for tensor in tensors)
    of_phase = {name: 1e-6 * sum(max(0.0, min(to, end) - max(since, begin)) for what, since, to in phases
                                 if what == name) for name in _PHASES}
    return Step(number, count, 1e-6 * (end - begin), {name: 1e-6 * us for name, us in parts.items()},
                1e-6 * max(0.0, max(tensor.end for tensor in tensors) - all_ready), count_of_tensors,
                round(sum(1 / tensor.fused for tensor in tensors)), sum(tensor.nbytes for tensor in tensors), rank,
                times / count_of_tensors, dict(ran), {name: seconds for name, seconds in of_phase.items() if seconds})


def _partition(begin: float, end: float, slices: list[tuple[str, float, float]]) -> dict[str, float]:
    """Every moment of [begin, end) counts once, for what weighs most then."""
    changes = []
    for what, since, to in slices:
        since, to = max(since, begin), min(to, end)
        if since < to:
            changes += [(since, what, 1), (to, what, -1)]
    time = dict.fromkeys((*_BY_WEIGHT, COMPUTE), 0.0)
    open_slices: dict[str, int] = collections.defaultdict(int)
    before = begin
    for moment, what, by in [*sorted(changes), (end, "", 0)]:
        current = next((name for name in _BY_WEIGHT if open_slices[name]), COMPUTE)
        time[current] += moment - before
        before = moment
        open_slices[what] += by
    return time
