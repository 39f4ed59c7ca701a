"""run(): a function on ranks that Spark places."""
import io
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn, Optional, Union

from lightcc.launch import pickling
from lightcc.spark.session import Session, Stage
from lightcc.spark.settings import seconds_of, settings_of
from lightcc.spark.task import BEGIN, END, RESULT, STDERR, STDOUT, Call

_LOOK_S = 0.1


def run(fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {},  # noqa: B006  Horovod's
        num_proc: Optional[int] = None, start_timeout: Optional[int] = None, use_mpi: Optional[bool] = None,
        use_gloo: Optional[bool] = None, extra_mpi_args: Optional[str] = None, env: Optional[Mapping[str, str]] = None,
        stdout: Any = None, stderr: Any = None, verbose: int = 1, nics: Union[str, Sequence[str], None] = None,
        prefix_output_with_timestamp: bool = False, executable: Optional[str] = None) -> list[Any]:
    """Runs fn(*args, **kwargs) on num_proc ranks, which are tasks of a barrier stage of the active Spark session, a
    classic one or one of Spark Connect; returns their results in rank order.

    num_proc: default: as many as Spark runs at the same time. start_timeout: seconds for which all tasks may wait for
    their start; default HOROVOD_SPARK_START_TIMEOUT, else 600. env: further variables of the ranks. stdout, stderr:
    streams that get what the ranks print, tagged with the rank, when all have ended; default: this process's. At once
    it is in the executors' logs. verbose: 0 leaves that out. prefix_output_with_timestamp: time before each line.
    nics: network interfaces between the hosts. executable: the Python of the ranks; default: that of Spark's tasks.
    use_mpi, use_gloo and extra_mpi_args have no effect. GPUs are those of the tasks' resource "gpu"; each rank sees all
    of its host's ranks.

    Errors: RuntimeError with rank, host and traceback of the rank that failed first, without an active session and with
    dynamic allocation; TimeoutError with the number of slots if there are too few, or no room before start_timeout;
    TypeError, which names the variable, if something of the call cannot be pickled; KeyboardInterrupt after Ctrl-C,
    when the job is cancelled. Source: horovod.spark.run.

        SparkSession.builder.master("local[2]").getOrCreate()
        losses = lightcc.spark.run(train, args=(0.1,), num_proc=2)
    """
    pickling.check(fn, args, kwargs)
    function = io.BytesIO()
    pickling.write(function, fn, args, kwargs)
    variables = settings_of(env, nics)
    session = Session()
    timeout_s = seconds_of(start_timeout, "HOROVOD_SPARK_START_TIMEOUT")
    deadline = time.monotonic() + timeout_s
    num_proc = session.slots() if num_proc is None else num_proc
    if num_proc < 1:
        raise ValueError(f"run: num_proc={num_proc}: at least 1 is expected")
    while session.slots() < num_proc:  # executors may be on their way; Spark itself would look for ten minutes
        if time.monotonic() > deadline:
            raise session.no_room("run", num_proc, timeout_s)
        time.sleep(_LOOK_S)
    stage = session.begin(num_proc, Call(function.getvalue(), variables, executable, prefix_output_with_timestamp))
    try:
        while not stage.over.wait(_LOOK_S) and not stage.has_started():
            if time.monotonic() > deadline:
                raise session.no_room("run", num_proc, timeout_s)
        stage.over.wait()
    except BaseException:  # such as Ctrl-C, as it comes out of a call of Spark
        stage.cancel()
        raise
    if stage.error is not None:
        _fail(stage.error)
    return _results(stage, num_proc, *((stdout, stderr) if verbose else (io.StringIO(), io.StringIO())))


def _fail(error: Exception) -> NoReturn:
    """What a rank has said is somewhere in Spark's message; what Spark says itself, as of a lost executor, stays."""
    text = str(error)
    begin, end = text.find(f"RuntimeError: {BEGIN}"), text.find(END)
    if 0 <= begin < end:
        raise RuntimeError(text[begin + len("RuntimeError: "):end]) from None
    raise RuntimeError(f"run: the job of Spark has failed: {text}") from error


def _results(stage: Stage, num_proc: int, stdout: Any, stderr: Any) -> list[Any]:
    results = [b""] * num_proc
    for rank, kind, data in stage.parts:
        if kind == RESULT:
            results[rank] += data
        elif data:
            stream = (stdout or sys.stdout) if kind == STDOUT else (stderr or sys.stderr)
            assert kind in (STDOUT, STDERR)
            stream.write(data.decode(errors="replace"))
            stream.flush()
    found = []
    for rank, data in enumerate(results):
        try:
            found.append(pickle.loads(data))
        except Exception as error:
            raise RuntimeError(f"run: the result of rank {rank} cannot be unpickled here: {error!r}") from error
    return found
