"""The metrics of a rank: what it has done since init, as numbers with a name and a unit (docs/metrics.md).

`METRICS` is the one list of them: metrics(), the page for Prometheus and the dashboard are made from it or tested
by it.
"""
import json
import time
from typing import Any, Dict, NamedTuple, Optional, Tuple

from lightcc.core import lib


class Metric(NamedTuple):
    """counter: it only grows, until the next init; gauge: a value of now."""

    name: str
    unit: str
    kind: str
    help: str

    @property
    def page_name(self) -> str:
        """Its name in Prometheus's text format.

        >>> METRICS[0].page_name
        'lightcc_steps_total'
        """
        return f"lightcc_{self.name}" + ("_total" if self.kind == "counter" else "")


METRICS = (
    Metric("steps", "steps", "counter", "Training steps that have begun: how often the same named all-reduce came"),
    Metric("uptime_seconds", "s", "gauge", "Time since init"),
    Metric("exposed_seconds", "s", "counter",
           "Time from the last submission to the last result, whether the program waited or computed"),
    Metric("exposed_share", "0 to 1", "gauge", "The share of the time since init that is exposed_seconds"),
    Metric("wait_seconds", "s", "counter", "Time that threads of the program spent waiting for results"),
    Metric("requests", "requests", "counter", "Calls of the framework that have finished, a tensor or a group each"),
    Metric("fast_path_requests", "requests", "counter", "Of the requests, those that needed no negotiation"),
    Metric("collectives", "collectives", "counter", "Collectives that have run, each with all that was fused into it"),
    Metric("payload_bytes", "bytes", "counter", "Bytes of tensors that collectives worked on"),
    Metric("copied_bytes", "bytes", "counter", "Bytes copied within this rank's memory, into and out of buckets"),
    Metric("sent_bytes", "bytes", "counter", "Bytes sent to other hosts, over TCP, HARP or a network plugin"),
    Metric("fused_requests", "requests", "counter", "Requests that travelled together with others"),
    Metric("fused_batches", "batches", "counter", "Batches of more than one tensor"),
    Metric("batches", "batches", "counter", "Batches that have run, with one tensor or more"),
    Metric("planned_requests", "requests", "counter", "Requests that travelled by a fusion plan"),
    Metric("compressed_bytes", "bytes", "counter", "Bytes of tensors that were compressed between hosts"),
    Metric("saved_bytes", "bytes", "counter", "Bytes that this rank did not have to send, thanks to compression"),
    Metric("retransmits", "packets", "counter", "Packets that TCP or HARP has sent again"),
    Metric("reconnects", "connections", "counter", "TCP connections that took the place of one that broke"),
    Metric("stall_warnings", "warnings", "counter", "Warnings of stalls and deadlocks"),
    Metric("elastic_resets", "resets", "counter", "How often elastic training entered a new world; kept across init"),
    Metric("ranks", "ranks", "gauge", "Ranks of the job"),
)
WAITING = Metric("waiting_seconds", "s", "counter",
                 "Time that all other ranks, ready themselves, waited for this peer; kept by rank 0")

_FROM_COUNTERS = {"fast_path_requests": "fast_path", "planned_requests": "planned"}
_elastic_resets = 0
_began: Tuple[int, float] = (0, 0.0)  # the epoch, and when it began


def begin() -> None:
    """A world has formed: time counts from here."""
    global _began
    if _began[0] != lib.epoch:
        _began = lib.epoch, time.monotonic()


def count_elastic_reset() -> None:
    global _elastic_resets
    _elastic_resets += 1


def metrics() -> Dict[str, Any]:
    """What this rank has done since init, by name. It communicates with nobody and may be called at any time, from any
    thread.

    The names, with their units, are those of lightcc.core.metrics.METRICS and docs/metrics.md: "steps",
    "payload_bytes", "exposed_share" and so on. Besides, "waiting_by_peer" is a dictionary of seconds by rank: how long
    all others, ready themselves, waited for that rank alone. Rank 0 knows it; on other ranks it is empty.

    Errors: ValueError before init.

    >>> hvd.init(); before = hvd.metrics()["requests"]
    >>> hvd.barrier(); hvd.metrics()["requests"] - before
    1
    """
    found = snapshot()
    if found is None:
        raise lib.not_initialised()
    return found


def snapshot() -> Optional[Dict[str, Any]]:
    """metrics(), or None while lightcc is not initialised."""
    counters = lib.counters()
    if not counters:
        return None
    uptime = max(time.monotonic() - _began[1], 1e-9)
    exposed = counters["exposed_ns"] * 1e-9
    values: Dict[str, Any] = {
        "uptime_seconds": uptime, "exposed_seconds": exposed, "exposed_share": min(exposed / uptime, 1.0),
        "wait_seconds": counters["wait_ns"] * 1e-9, "elastic_resets": _elastic_resets, "ranks": max(lib.size(), 0),
        "sent_bytes": sum(counters[of] for of in ("tcp_bytes", "harp_bytes", "net_plugin_bytes"))}
    found = {metric.name: values[metric.name] if metric.name in values
             else counters[_FROM_COUNTERS.get(metric.name, metric.name)] for metric in METRICS}
    waited = lib.waited() if lib.rank() == 0 else []
    found["waiting_by_peer"] = {rank: ns * 1e-9 for rank, ns in enumerate(waited)}
    return found


def report(values: Dict[str, Any], host: str) -> None:
    """Sends them to rank 0, which shows the last that it has of each rank; does nothing once the epoch is over."""
    sent = {**{name: value for name, value in values.items() if name != "waiting_by_peer"},
            "host": host, "reported_at": time.time()}
    lib.report(json.dumps(sent))


def reported(rank: int) -> Optional[Dict[str, Any]]:
    """What a rank has reported last, on rank 0, with its host and the time since 1970; None: nothing yet."""
    text = lib.reported(rank)
    return json.loads(text) if text else None


def write_metrics(writer: Any, step: int) -> None:
    """Writes the metrics of this rank as scalars for TensorBoard, under "lightcc/<name>".

    writer: anything with add_scalar(tag, value, step), as torch.utils.tensorboard.SummaryWriter and tensorboardX have;
    lightcc.tensorflow.write_metrics takes TensorFlow's writers. step: the number on the axis. Waiting is written as
    "lightcc/waiting_seconds/<rank>", by rank 0. Errors: ValueError before init; TypeError for another writer.

    >>> class Printer:
    ...     def add_scalar(self, tag, value, step):
    ...         if tag == "lightcc/ranks": print(tag, value >= 1, step)
    >>> hvd.write_metrics(Printer(), step=7)
    lightcc/ranks True 7
    """
    values = metrics()
    waiting = values.pop("waiting_by_peer")
    scalars = {f"lightcc/{name}": value for name, value in values.items()}
    scalars.update({f"lightcc/waiting_seconds/{rank}": seconds for rank, seconds in waiting.items()})
    if not hasattr(writer, "add_scalar"):
        raise TypeError(f"write_metrics: a {type(writer).__name__} is no writer, as it has no add_scalar; give a "
                        "SummaryWriter of torch or of tensorboardX. lightcc.tensorflow.write_metrics takes what "
                        "tf.summary.create_file_writer returns.")
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)
