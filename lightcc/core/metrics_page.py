"""Shows the metrics of all ranks: rank 0 at LIGHTCC_METRICS, in Prometheus's text format, and as a line of the log.

A thread of each rank reports to rank 0 every two seconds, by the control plane that the ranks have anyway. A page that
cannot be shown is a warning and no end of the job. Neither page nor file has anything in it but numbers, ranks and the
names of hosts.
"""
import contextlib
import os
import re
import socket
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from lightcc.core import lib
from lightcc.core.knobs import knob
from lightcc.core.metrics import METRICS, WAITING, report, reported, snapshot

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

REPORT_S = 2.0   # between two reports of a rank
LINE_S = 60.0    # between two lines of the log
_REQUEST_S = 5   # a client that takes longer is dropped
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_VERBOSE = ("trace", "debug", "info")

Metrics = Dict[str, Any]
_publisher: Optional["_Publisher"] = None


def begin() -> None:
    """A world has formed: shows its metrics until end(), if that was asked for."""
    global _publisher
    if _publisher is not None and _publisher.epoch == lib.epoch:
        return
    end()
    place, logs = knob("LIGHTCC_METRICS"), knob("HOROVOD_LOG_LEVEL") in _VERBOSE
    if place or logs:
        _publisher = _Publisher(place, logs)
        _publisher.start()


def end() -> None:
    """This rank leaves its world, or has left it."""
    global _publisher
    publisher, _publisher = _publisher, None
    if publisher is not None:
        publisher.end()


def _forget() -> None:
    """In the child of a fork: its threads are not there, and the port is the parent's."""
    global _publisher
    publisher, _publisher = _publisher, None
    if publisher is not None and publisher.server is not None:
        with contextlib.suppress(OSError):
            publisher.server.socket.close()


os.register_at_fork(after_in_child=_forget)


def text_of(ranks: Dict[int, Metrics], waiting: Dict[int, float]) -> str:
    """The page: the metrics of each rank, as metrics() has them with "host" and "reported_at", and on whom they waited.

    >>> text_of({0: {"steps": 3, "host": "a", "reported_at": 1.5}}, {}).splitlines()[2]
    'lightcc_steps_total{rank="0",host="a"} 3'
    """
    labels = {rank: f'rank="{rank}",host="{_escaped(values["host"])}"' for rank, values in ranks.items()}
    lines: List[str] = []
    for metric in METRICS:
        lines += [f"# HELP {metric.page_name} {metric.help}.", f"# TYPE {metric.page_name} {metric.kind}"]
        lines += [f"{metric.page_name}{{{labels[rank]}}} {values[metric.name]}" for rank, values in ranks.items()
                  if metric.name in values]
    lines += ["# HELP lightcc_reported_timestamp_seconds When the rank has reported last, since 1970.",
              "# TYPE lightcc_reported_timestamp_seconds gauge"]
    lines += [f"lightcc_reported_timestamp_seconds{{{labels[rank]}}} {values['reported_at']}"
              for rank, values in ranks.items()]
    lines += [f"# HELP {WAITING.page_name} {WAITING.help}.", f"# TYPE {WAITING.page_name} {WAITING.kind}"]
    lines += [f'{WAITING.page_name}{{peer="{peer}"}} {seconds}' for peer, seconds in waiting.items()]
    return "\n".join(lines) + "\n"


def line_of(before: Dict[int, Metrics], now: Dict[int, Metrics], waited: Dict[int, float], seconds: float) -> str:
    """A line for the log. before, now: metrics of ranks, by rank, so many seconds apart. waited: seconds of that time,
    by rank, that the others waited for it.

    >>> old, new = {"steps": 10, "exposed_seconds": 1.0}, {"steps": 130, "exposed_seconds": 7.0}
    >>> line_of({0: old}, {0: new}, {0: 0.0, 1: 3.0}, 60.0)
    'metrics: 2 steps/s, 10 % of the time exposed; slowest: rank 1, waited for 5 % of the time'
    """
    both = [(before[rank], now[rank]) for rank in now if rank in before]
    if not both:
        return "metrics: no rank has reported yet"
    steps = max(after["steps"] - first["steps"] for first, after in both) / seconds
    exposed = sum(after["exposed_seconds"] - first["exposed_seconds"] for first, after in both) / len(both) / seconds
    slowest = max(waited, key=lambda rank: waited[rank], default=0)
    share = waited.get(slowest, 0.0) / seconds
    late = f"slowest: rank {slowest}, waited for {100 * share:.3g} % of the time" if share else "no rank was waited for"
    return f"metrics: {steps:.4g} steps/s, {100 * exposed:.3g} % of the time exposed; {late}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _address_of(place: str) -> Optional[Tuple[str, int]]:
    """"9400" is a port of the loopback interface, "0.0.0.0:9400" one of all; None: a file."""
    match = re.fullmatch(r"(?:(?:\[([^\]]+)\]|([^:/]*)):)?(\d+)", place)
    return match and (match[1] or match[2] or "127.0.0.1", int(match[3]))


class _Publisher(threading.Thread):
    """What begin() has started. place: LIGHTCC_METRICS. logs: whether rank 0 writes lines to the log."""

    def __init__(self, place: str, logs: bool):
        super().__init__(name="lightcc-metrics", daemon=True)
        self._rank, self._host = lib.rank(), socket.gethostname()
        self._place, self._logs = place, logs
        self._ended = threading.Event()
        self.epoch = lib.epoch
        self._warned = False
        self._before: Tuple[float, Dict[int, Metrics], Dict[int, float]] = (time.monotonic(), {}, {})
        self.server: Optional["ThreadingHTTPServer"] = None
        self._file = ""
        snapshot()  # from this look on the fast path is timed
        if place and self._rank == 0:
            address = _address_of(place)
            if address is None:
                self._file = place
                self._write()
            else:
                self._serve(*address)

    def run(self) -> None:
        while not self._ended.wait(REPORT_S):
            self._report()
            if self._rank == 0:
                self._write()
                if self._logs:
                    self._log()

    def end(self) -> None:
        """While the world is still there, others may hear of the last steps."""
        self._ended.set()
        self.join()
        if lib.initialized() and lib.epoch == self.epoch:
            self._report()
            self._write()
        if self.server is not None:
            with contextlib.suppress(OSError):
                self.server.socket.shutdown(socket.SHUT_RDWR)  # wakes serve_forever, which looks twice a second
            self.server.shutdown()
            self.server.server_close()

    def page(self) -> str:
        """Of rank 0, with what it has just done itself."""
        self._report()
        return text_of(*self._collected())

    def _report(self) -> None:
        values = snapshot()
        if values is not None:
            report(values, self._host)

    def _collected(self) -> Tuple[Dict[int, Metrics], Dict[int, float]]:
        found = {rank: reported(rank) for rank in range(max(lib.size(), 0))}
        own = snapshot()
        return ({rank: values for rank, values in found.items() if values is not None},
                {} if own is None else own["waiting_by_peer"])

    def _log(self) -> None:
        now = time.monotonic()
        then, before, waited = self._before
        if before and now - then < LINE_S:
            return
        ranks, waiting = self._collected()
        self._before = now, ranks, waiting
        if before:
            lib.log(lib.INFO, line_of(before, ranks, {rank: seconds - waited.get(rank, 0.0)
                                                      for rank, seconds in waiting.items()}, now - then))

    def _write(self) -> None:
        """The file is replaced as a whole, so that nobody reads half of it. A device, as /dev/null, is not replaced."""
        if not self._file:
            return
        if os.path.lexists(self._file) and not stat.S_ISREG(os.lstat(self._file).st_mode):
            self._warn(f"cannot write its metrics to '{self._file}': it is no regular file. Give a file that exists as "
                       "such or not at all")
            return
        part = f"{self._file}.{os.getpid()}.part"
        try:
            with open(part, "w", encoding="utf-8") as file:
                file.write(self.page())
            os.replace(part, self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(part)
            self._warn(f"cannot write its metrics to '{self._file}': {error.strerror}. Give a file in a folder that "
                       "exists and may be written to")

    def _serve(self, host: str, port: int) -> None:
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # here, for those who show a page
        from socketserver import TCPServer

        publisher = self

        class Handler(BaseHTTPRequestHandler):
            timeout = _REQUEST_S

            def do_GET(self) -> None:
                if self.path not in ("/", "/metrics"):
                    self.send_error(404, "the metrics are at /metrics")
                    return
                body = publisher.page().encode()
                self.send_response(200)
                self.send_header("Content-Type", _TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Says nothing of each request."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def server_bind(self) -> None:
                """HTTPServer's asks DNS for the host's name, which may take long."""
                TCPServer.server_bind(self)
                self.server_name, self.server_port = host, self.server_address[1]

            def handle_error(self, *_: Any) -> None:
                """A client that has gone is nobody's business."""

        try:
            self.server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            self._warn(f"cannot show its metrics at {host}:{port}: {getattr(error, 'strerror', None) or error}. Choose "
                       "a port that is free (0: any) and an address of this host")
            return
        threading.Thread(target=self.server.serve_forever, name="lightcc-metrics-http", daemon=True).start()
        lib.log(lib.INFO, f"metrics: http://{host}:{self.server.server_address[1]}/metrics")

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            lib.log(lib.WARNING, f"LIGHTCC_METRICS={self._place}: rank {self._rank} on host {self._host} {text}. "
                                 "Training goes on without")
