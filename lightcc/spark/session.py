"""What run() and run_elastic() ask of a Spark session, which is a classic one or one of Spark Connect: how many tasks
run at the same time, a barrier stage or a single task, whether it has started, and its end."""
import contextlib
import inspect
import re
import threading
import time
import uuid
from typing import Any, Callable, Iterable, Iterator, List, Optional

from lightcc.launch import network
from lightcc.launch.offers import Invitation
from lightcc.spark.task import Call, Part, run_offer, run_rank

_SCHEMA = "rank int, kind string, data binary"
_CANCEL_S = 60.0  # for the stage to be over once it is cancelled
_AGAIN_S = 0.5


class Session:
    def __init__(self, elastic: bool = False) -> None:
        """The active one. RuntimeError if there is none, or, unless elastic, if its executors come and go."""
        self.spark = _active("run_elastic" if elastic else "run")
        try:
            self._context = self.spark.sparkContext
        except Exception:  # Spark Connect has none, and says so in another way in each version
            self._context = None
        if not elastic and str(self.spark.conf.get("spark.dynamicAllocation.enabled", "false")).lower() == "true":
            raise RuntimeError("run: all ranks must run at the same time, as tasks of a barrier stage, and Spark has "
                               "none with dynamic allocation. Start the session with "
                               "spark.dynamicAllocation.enabled=false, or call run_elastic")

    def slots(self) -> int:
        """Tasks that run at the same time, those of other jobs included."""
        if self._context is not None:
            scala = self._context._jsc.sc()
            return scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile())
        plan = self.spark.range(1)._explain_string()  # a query would wait for a slot
        splits = re.search(r"splits=(\d+)", plan)
        if splits is None:
            raise RuntimeError(f"run: Spark does not say by how many tasks it makes a range: {plan}")
        return int(splits[1])

    def no_room(self, caller: str, num_proc: int, timeout_s: float) -> TimeoutError:
        slots = self.slots()
        busy = "" if slots < num_proc else ", and other jobs have some of them"
        return TimeoutError(
            f"{caller}: Spark has not started {num_proc} tasks at the same time within {timeout_s:g} s: it has {slots} "
            f"slot{'s' * (slots != 1)} for tasks{busy}. Ask for fewer ranks (num_proc), add executors or cores, or "
            "wait longer (start_timeout)")

    def begin(self, num_proc: int, call: Call) -> "Stage":
        return Stage(self.spark, self._context, _collector(self.spark, self._context, num_proc, call))

    def begin_offer(self, invitation: Invitation) -> "Stage":
        """A task without barrier that offers to run an agent."""
        return Stage(self.spark, self._context, lambda: _offer(self.spark, invitation))

    def driver_addresses(self, interfaces: str) -> List[str]:
        """Of this process, as executors reach it. interfaces: as LIGHTCC_IFACE; "" lets Spark's own setting decide."""
        host = None if self._context is None or interfaces else self._context.getConf().get("spark.driver.host")
        found = network.interfaces()
        if host or not found:
            return [host or "127.0.0.1"]
        return [one.address for one in network.chosen(found, interfaces)]


class Stage:
    """A stage that has been handed to Spark."""

    def __init__(self, spark: Any, context: Any, collect: Callable[[], List[Part]]) -> None:
        self._spark, self._context = spark, context
        self._tag = f"lightcc-{uuid.uuid4().hex}"
        self._started = threading.Event()
        self.over = threading.Event()
        self.parts: List[Part] = []
        self.error: Optional[Exception] = None
        self._collect = collect
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def has_started(self) -> bool:
        """Whether Spark has begun its tasks; True where Spark does not tell."""
        if self.over.is_set() or self._started.is_set():
            return True
        if self._context is None:
            return not hasattr(self._spark, "registerProgressHandler")
        tracker = self._context.statusTracker()
        jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._tag)))
        stages = filter(None, (tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds))
        return any(stage.numActiveTasks or stage.numCompletedTasks or stage.numFailedTasks for stage in stages)

    def cancel(self) -> None:
        """Until it is over: Spark forgets what it is told before it knows the job."""
        deadline = time.monotonic() + _CANCEL_S
        while not self.over.is_set() and time.monotonic() < deadline:
            self._cancel()
            self.over.wait(_AGAIN_S)

    def _cancel(self) -> None:
        if self._context is not None:
            self._context.cancelJobGroup(self._tag)
        else:
            self._spark.interruptTag(self._tag)

    def _run(self) -> None:
        try:
            if self._context is not None:
                self._context.setJobGroup(self._tag, "lightcc.spark", interruptOnCancel=True)
            else:
                self._spark.addTag(self._tag)
                if hasattr(self._spark, "registerProgressHandler"):
                    self._spark.registerProgressHandler(self._progress)
            self.parts = self._collect()
        except Exception as error:
            self.error = error
        finally:
            if self._context is None and hasattr(self._spark, "removeProgressHandler"):
                self._spark.removeProgressHandler(self._progress)
            self.over.set()

    def _progress(self, stages: Any, inflight_tasks: int, **_: Any) -> None:
        if inflight_tasks and threading.current_thread() is self._thread:  # the session's other queries come here, too
            self._started.set()


def _active(caller: str) -> Any:
    """Active ones are those of a thread; another thread has the default one."""
    from pyspark.sql import SparkSession

    kinds = [SparkSession]
    with contextlib.suppress(ImportError):  # PySpark without [connect], or older
        from pyspark.sql.connect.session import SparkSession as ConnectSession
        kinds.append(ConnectSession)
    for kind in kinds:
        with contextlib.suppress(RuntimeError):  # as PySpark says that there is none
            found = kind.active() if hasattr(kind, "active") else kind.getActiveSession()  # before 3.5
            if found is not None:
                return found
    raise RuntimeError(f"{caller}: there is no active Spark session here; make one first: "
                       "SparkSession.builder.getOrCreate()")


def _collector(spark: Any, context: Any, num_proc: int, call: Call) -> Callable[[], List[Part]]:
    """Runs a rank in each task, by the API that this Spark has."""
    from pyspark.sql import DataFrame

    if "barrier" in inspect.signature(DataFrame.mapInArrow).parameters:
        return lambda: by_arrow(spark, num_proc, call)
    return lambda: by_rdd(context, num_proc, call)


def by_arrow(spark: Any, num_proc: int, call: Call) -> List[Part]:
    """From Spark 3.5 on, with Spark Connect too."""
    def task(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow

        for _ in batches:  # the one row that makes this partition
            pass
        for part in run_rank(call):
            yield pyarrow.RecordBatch.from_arrays(
                [pyarrow.array([part.rank], pyarrow.int32()), pyarrow.array([part.kind]),
                 pyarrow.array([part.data], pyarrow.binary())], ["rank", "kind", "data"])

    rows = spark.range(0, num_proc, 1, num_proc).mapInArrow(task, _SCHEMA, barrier=True).collect()
    return [Part(row[0], row[1], bytes(row[2])) for row in rows]


def by_rdd(context: Any, num_proc: int, call: Call) -> List[Part]:
    """For Spark 3.3 and 3.4."""
    def task(_: Iterable[Any]) -> Iterator[Any]:
        return run_rank(call)

    rows = context.parallelize(range(num_proc), num_proc).barrier().mapPartitions(task).collect()
    return [Part(*row) for row in rows]


def _offer(spark: Any, invitation: Invitation) -> List[Part]:
    def task(batches: Iterable[Any]) -> Iterator[Any]:
        for _ in batches:
            pass
        run_offer(invitation)
        yield from ()

    spark.range(0, 1, 1, 1).mapInArrow(task, _SCHEMA).collect()
    return []
