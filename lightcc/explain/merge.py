"""Puts the timelines of all ranks and profiles of PyTorch into one file for Perfetto, joined by their clocks."""

import datetime
import gzip
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

Event = dict[str, Any]
_WALL = "start_time_since_epoch_in_micros"  # of a timeline, in its first event
_WRITER = re.compile(r"lightcc rank (\d+) of (\d+) on host (.*)")
_ABSOLUTE_US = 1e14  # older profiles have times since 1970 and no base; nobody has run this long
_ROWS_OF_A_RANK = 1 << 20  # process numbers in the merged file: a rank's timeline and profile stay together
_SPAN = "lightcc."
_APART_S = 60.0  # recordings of one run that are further apart than this were made by clocks that differ


class Recording(NamedTuple):
    """A file. start_us: since 1970, of its time 0. rank: of a timeline, or of a profile that says so."""

    path: str
    events: list[Event]
    start_us: float
    rank: Optional[int]
    host: str
    is_profile: bool

    def range_us(self) -> tuple[float, float]:
        """From when to when, since 1970, it has events."""
        timed = [event for event in self.events if event.get("ph") != "M" and "ts" in event]
        if not timed:
            raise ValueError(f"{self.path}: nothing was recorded in it")
        return (self.start_us + min(float(event["ts"]) for event in timed),
                self.start_us + max(float(event["ts"]) + float(event.get("dur", 0)) for event in timed))


def merge(paths: Sequence[str], out: str) -> str:
    """Merges recordings into the file `out` and returns a line about it.

    paths: timelines of lightcc, of either layout, one a rank; and files that torch.profiler's export_chrome_trace has
    written (.json or .json.gz). Each rank becomes a process with lightcc's rows; a profile keeps its own processes.
    Times are as good as the clocks of the hosts: microseconds on one host, what NTP achieves between several.

    Errors: ValueError for a file that is neither, two timelines of one rank, ranks of different jobs, a profile
    without a span of lightcc's, a recording whose clock is not known or which lies at another time than the others;
    OSError for a file that cannot be read or written.
    """
    recordings = [load(path) for path in paths]
    _check_ranks([one for one in recordings if not one.is_profile])
    _check_clocks(recordings)
    base = min(one.range_us()[0] for one in recordings)
    events: list[Event] = []
    for number, one in enumerate(recordings):
        events += _moved(one, number, one.start_us - base)
    with _open(out, "wt") as file:
        json.dump({"displayTimeUnit": "ms", "traceEvents": events, "metadata": {_WALL: round(base)}}, file)
    profiles = sum(one.is_profile for one in recordings)
    return (f"{out}: {len(recordings) - profiles} timelines and {profiles} profiles, {len(events)} events; open it in "
            "ui.perfetto.dev")


def load(path: str) -> Recording:
    """Reads a timeline or a profile; the end of a timeline may be missing. ValueError, OSError: see merge."""
    try:
        with _open(path, "rt") as file:
            text = file.read()
        try:
            content = json.loads(text)
        except json.JSONDecodeError:  # of a rank that was killed
            content = json.loads(text[:text.rfind("}") + 1] + "]")
        if isinstance(content, dict):
            return _profile(path, content)
        return _timeline(path, content)
    except (UnicodeDecodeError, json.JSONDecodeError, gzip.BadGzipFile, EOFError, TypeError, AttributeError, KeyError,
            IndexError):
        raise ValueError(f"{path}: this is neither a timeline of lightcc (lightccrun --timeline-filename) nor what "
                         "torch.profiler's export_chrome_trace writes") from None


def _open(path: str, mode: str) -> Any:
    return gzip.open(path, mode, encoding="utf-8") if path.endswith(".gz") else open(path, mode, encoding="utf-8")


def _timeline(path: str, events: list[Event]) -> Recording:
    about = events[0]["args"]
    writer = _WRITER.fullmatch(about["name"])
    if writer is None or _WALL not in about:
        raise KeyError
    return Recording(path, events, float(about[_WALL]), int(writer[1]), writer[3], False)


def _profile(path: str, content: dict[str, Any]) -> Recording:
    events = [event for event in content["traceEvents"] if isinstance(event, dict)]
    if not any(str(event.get("name", "")).startswith(_SPAN) for event in events):
        raise ValueError(f"{path}: no span of lightcc's is in this profile. Profile steps of a "
                         "hvd.DistributedOptimizer or of a process group of lightcc's, with ProfilerActivity.CPU")
    rank = content.get("distributedInfo", {}).get("rank")
    base_ns = content.get("baseTimeNanoseconds")
    if base_ns is None:
        times = [float(event["ts"]) for event in events if event.get("ph") == "X"]
        if not times or min(times) < _ABSOLUTE_US:
            raise ValueError(f"{path}: its clock cannot be joined with the timelines': it has no baseTimeNanoseconds, "
                             "and its times are not since 1970. Record it with PyTorch 2.1 or later")
    return Recording(path, events, float(base_ns or 0) / 1e3, rank, "", True)


def _check_ranks(timelines: list[Recording]) -> None:
    if not timelines:
        raise ValueError("none of these files is a timeline of lightcc; record one with lightccrun "
                         "--timeline-filename '/tmp/timeline.{rank}.json'")
    of_rank: dict[Optional[int], str] = {}
    sizes = {}
    for one in timelines:
        if one.rank in of_rank:
            raise ValueError(f"{one.path} and {of_rank[one.rank]} are both of rank {one.rank}; give one file of "
                             "each rank, all of one run")
        of_rank[one.rank] = one.path
        writer = _WRITER.fullmatch(one.events[0]["args"]["name"])
        sizes[writer[2] if writer else ""] = one.path
    if len(sizes) > 1:
        raise ValueError("these timelines are of different jobs: " + ", ".join(
            f"{path} of {size} ranks" for size, path in sizes.items()))


def _check_clocks(recordings: list[Recording]) -> None:
    """All were made in one run: those whose clock is another lie apart."""
    first = recordings[0]
    for one in recordings[1:]:
        (begin, end), (since, until) = first.range_us(), one.range_us()
        if begin > until + _APART_S * 1e6 or since > end + _APART_S * 1e6 or one.is_profile and (
                begin > until or since > end):
            raise ValueError(f"the clocks of {first.path} ({_clock(begin)} to {_clock(end)}) and {one.path} "
                             f"({_clock(since)} to {_clock(until)}) cannot be joined: they have no time in common. "
                             "Give files of one run, and set the clocks of all hosts by NTP")


def _clock(us: float) -> str:
    return datetime.datetime.fromtimestamp(us / 1e6, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f UTC")


def _moved(one: Recording, number: int, by_us: float) -> list[Event]:
    """The events of a recording as they are in the merged file."""
    return _profile_events(one, number, by_us) if one.is_profile else _rank_events(one, by_us)


def _rank_events(one: Recording, by_us: float) -> list[Event]:
    """A timeline as one process: in Horovod's layout each row was one."""
    pid = (one.rank or 0) * _ROWS_OF_A_RANK
    rows = "process_name" if any(event.get("name") == "process_sort_index" for event in one.events) else "thread_name"
    events = [_about("process_name", pid, 0, name=f"rank {one.rank}: lightcc, on host {one.host}"),
              _about("process_sort_index", pid, 0, sort_index=2 * (one.rank or 0))]
    for event in one.events[1:]:
        tid = event.get("tid", 0)
        if event["ph"] == "M":
            if event["name"] == rows:
                events.append(_about("thread_name", pid, tid, name=event["args"]["name"]))
                events.append(_about("thread_sort_index", pid, tid, sort_index=tid))
            continue
        moved = {**event, "pid": pid, "tid": tid, "ts": round(event["ts"] + by_us, 3)}
        if event["ph"] == "i":
            moved["s"] = "p"  # a line through this rank's rows alone
        events.append(moved)
    return events


def _profile_events(one: Recording, number: int, by_us: float) -> list[Event]:
    of_rank = f"rank {one.rank}" if one.rank is not None else one.path
    order = 2 * one.rank + 1 if one.rank is not None else _ROWS_OF_A_RANK + number
    pids: dict[Any, int] = {}
    rows: dict[tuple[int, str], int] = {}  # kineto has rows whose number is a name
    events = []
    for event in one.events:
        moved = dict(event)
        if "pid" in event:
            if event["pid"] not in pids:
                pids[event["pid"]] = (number + 1) * _ROWS_OF_A_RANK - 1 - len(pids)
                events.append(_about("process_name", pids[event["pid"]], 0, name=f"{of_rank}: {event['pid']}"))
            moved["pid"] = pids[event["pid"]]
        if isinstance(event.get("tid"), str):
            row = moved["pid"], event["tid"]
            if row not in rows:
                rows[row] = (1 << 31) - 1 - len(rows)
                events.append(_about("thread_name", row[0], rows[row], name=row[1]))
            moved["tid"] = rows[row]
        if "id" in event:  # an arrow between two spans of this file
            moved["id"] = f"{number}.{event['id']}"
        if event.get("ph") == "M":
            if event["name"] == "process_name":
                moved["args"] = {"name": f"{of_rank}: {event['args'].get('name')}"}
            elif event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": order}
        if "ts" in event:
            moved["ts"] = round(float(event["ts"]) + by_us, 3)
        events.append(moved)
    return events


def _about(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
