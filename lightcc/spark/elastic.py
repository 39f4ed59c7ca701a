"""run_elastic(): an elastic job whose hosts are tasks of Spark; the driver is that of lightccrun's elastic jobs."""
import contextlib
import io
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Dict, List, Optional, Union

from lightcc.elastic import driver, results
from lightcc.elastic.limits import Limits
from lightcc.launch import pickling
from lightcc.launch.discovery import DiscoveryError, HostDiscovery
from lightcc.launch.local import Job
from lightcc.launch.offers import Offers
from lightcc.launch.run_files import RunFiles
from lightcc.spark.session import Session, Stage
from lightcc.spark.settings import seconds_of, settings_of

_LOOK_S = 0.1
_FAULTS = 3  # tasks that may fail before they have reached us, one after the other
# The Python of the task, which may be elsewhere than ours.
_COMMAND = ["/bin/sh", "-c", 'exec "$PYSPARK_PYTHON" -m lightcc.launch.task "$@"', "sh"]


def run_elastic(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {},  # noqa: B006  Horovod's
                num_proc: Optional[int] = None, min_num_proc: Optional[int] = None, max_num_proc: Optional[int] = None,
                start_timeout: Optional[int] = None, elastic_timeout: Optional[int] = None,
                reset_limit: Optional[int] = None, env: Optional[Mapping[str, str]] = None, stdout: Any = None,
                stderr: Any = None, verbose: int = 1, nics: Union[str, Sequence[str], None] = None,
                prefix_output_with_timestamp: bool = False, min_np: Optional[int] = None,
                max_np: Optional[int] = None) -> list[Any]:
    """Runs an elastic function (docs/elastic.md) on ranks that are tasks of the active Spark session, while executors
    come and go; returns what ranks 0 to min_num_proc - 1 of the last world return.

    num_proc: tasks that must run to begin; default: as many as Spark runs at the same time, at most max_num_proc.
    min_num_proc: fewest ranks that go on, default num_proc; max_num_proc: most ranks, for which Spark is asked all the
    time, default num_proc. start_timeout: seconds for the first num_proc tasks to start; default
    HOROVOD_SPARK_START_TIMEOUT, else 600. elastic_timeout: seconds for min_num_proc ranks to be there again; default
    HOROVOD_ELASTIC_TIMEOUT, else 600. reset_limit: most changes of the world. stdout, stderr: streams that get what the
    ranks print, as it comes; default: this process's; verbose: 0 leaves that out, 2 says what is started where. env,
    nics and prefix_output_with_timestamp: as those of run. min_np and max_np are deprecated names.

    A task connects to this process, so executors must be able to reach it; a rank sees the GPUs of its own task. A rank
    that fails costs its task, as a failed rank costs its host in other elastic jobs. When Spark has lost a task with
    its executor, another one is asked for.

    Errors: RuntimeError as of an elastic lightcc.run, without an active session, and if tasks fail before they reach
    this process; TimeoutError with the number of slots if too few tasks have started before start_timeout; ValueError
    for numbers that contradict each other; TypeError, which names the variable, if something of the call cannot be
    pickled; KeyboardInterrupt after Ctrl-C. Source: horovod.spark.run_elastic.

        results = lightcc.spark.run_elastic(train, args=(0.1,), num_proc=2, min_num_proc=1, max_num_proc=8)
    """
    pickling.check(fn, args, kwargs)
    session = Session(elastic=True)
    limits = _limits(session, num_proc, _renamed("min_np", min_np, "min_num_proc", min_num_proc),
                     _renamed("max_np", max_np, "max_num_proc", max_num_proc), elastic_timeout, reset_limit)
    settings, timeout_s = settings_of(env, nics), seconds_of(start_timeout, "HOROVOD_SPARK_START_TIMEOUT")
    interfaces = settings.get("LIGHTCC_IFACE") or os.environ.get("LIGHTCC_IFACE", "")
    signals = (signal.SIGINT,) if threading.current_thread() is threading.main_thread() else ()
    with contextlib.ExitStack() as stack:
        run_files = stack.enter_context(RunFiles([]))
        with open(run_files.function, "wb", closefd=False) as file:
            pickling.write(file, fn, args, kwargs)
        tasks = stack.enter_context(SparkTasks(session, int(limits.most), interfaces))
        outputs = [stack.enter_context(_descriptor(stream, number)) for stream, number in
                   (((stdout, 1), (stderr, 2)) if verbose else ((io.StringIO(), 1), (io.StringIO(), 2)))]
        tasks.wait(limits.num_proc, timeout_s)
        job = Job([], lambda rank: _COMMAND, run_files=run_files, settings=settings, set_on_hosts=list(os.environ),
                  timestamps=prefix_output_with_timestamp, verbose=verbose > 1, agent_command=tasks.agent_command,
                  start_timeout_s=timeout_s)
        outcome = driver.drive(job, limits, tasks, outputs[0], outputs[1], signals, is_here=lambda name: False)
        return results.values(outcome, limits.min_num_proc, run_files)


class SparkTasks(HostDiscovery):
    """Asks Spark for so many tasks, again when it has lost one. Those that run are the hosts, with a slot each."""

    def __init__(self, session: Session, count: int, interfaces: str) -> None:
        self._session = session
        self._offers = Offers(session.driver_addresses(interfaces), os.environ.get("LIGHTCC_PORT_RANGE", ""))
        self._stages: Dict[int, Stage] = {}
        self._asked = self._faults = 0
        self._lock = threading.Lock()  # the discovery's thread is not waited for when the job is over
        self._closed = False
        for _ in range(count):
            self._ask()

    def wait(self, count: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            while len(self.find_available_hosts_and_slots()) < count:
                if time.monotonic() > deadline:
                    raise self._session.no_room("run_elastic", count, timeout_s)
                time.sleep(_LOOK_S)
        except DiscoveryError as error:
            raise RuntimeError(str(error)) from error.__cause__

    def agent_command(self, host: str) -> List[str]:
        return self._offers.agent_command(host)

    def find_available_hosts_and_slots(self) -> Dict[str, int]:
        with self._lock:
            for number, stage in list(self._stages.items()):
                if stage.over.is_set() and not self._closed:
                    self._ended(number, stage)
            return self._offers.hosts()

    def _ended(self, number: int, stage: Stage) -> None:
        has_come = self._offers.has_come(number)
        self._offers.withdraw(number)
        del self._stages[number]
        if stage.error is None:  # its agent has ended: it stays away, as a host with a failed rank does
            return
        self._faults = 0 if has_come else self._faults + 1
        self._ask()
        if self._faults >= _FAULTS:
            raise DiscoveryError(f"run_elastic: {self._faults} tasks of Spark one after the other have failed before "
                                 f"they reached this process: {stage.error}") from stage.error

    def _ask(self) -> None:
        self._stages[self._asked] = self._session.begin_offer(self._offers.invitation(self._asked))
        self._asked += 1

    def __enter__(self) -> "SparkTasks":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        self._offers.close()
        for stage in self._stages.values():
            stage.cancel()


def _limits(session: Session, num_proc: Optional[int], fewest: Optional[int], most: Optional[int],
            elastic_timeout: Optional[int], reset_limit: Optional[int]) -> Limits:
    if num_proc is None:
        slots = max(1, session.slots())
        num_proc = max(fewest or 1, slots if most is None else min(slots, most))
    fewest, most = num_proc if fewest is None else fewest, num_proc if most is None else most
    if not 1 <= fewest <= num_proc <= most:
        raise ValueError(f"run_elastic: min_num_proc={fewest}, num_proc={num_proc}, max_num_proc={most}: expected "
                         "1 <= min_num_proc <= num_proc <= max_num_proc")
    return Limits(num_proc, fewest, most, seconds_of(elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT"), reset_limit,
                  hosts_may_come=True)


def _renamed(old: str, old_value: Optional[int], new: str, new_value: Optional[int]) -> Optional[int]:
    if old_value is None:
        return new_value
    warnings.warn(f"run_elastic: {old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
    return old_value


@contextlib.contextmanager
def _descriptor(stream: Any, default: int) -> Iterator[int]:
    """That of a stream; or of a pipe whose other end is copied to it, if it has none, as StringIO."""
    stream = stream or (sys.stdout if default == 1 else sys.stderr)
    stream.flush()
    try:
        descriptor = stream.fileno()
    except OSError:
        pass
    else:
        yield descriptor
        return
    reading, writing = os.pipe()

    def copy() -> None:
        with open(reading, encoding="utf-8", errors="replace", newline="") as lines:
            for line in lines:
                stream.write(line)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join()
        stream.flush()
