"""run(): a function in many processes, from Python. The function travels to the ranks, and their results back, in
anonymous memory (memfd) that only they inherit: no files, no ports, no pipe that could fill up, and nothing is
unpickled that another process could have written.
"""

import contextlib
import os
import pickle
import signal
import site
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn, Optional

from lightcc.runner import hosts as _hosts
from lightcc.runner import record
from lightcc.runner.local import Job
from lightcc.runner.supervise import Outcome, supervise


def run(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Optional[Mapping[str, Any]] = None,
        num_proc: int = 1, min_num_proc: Optional[int] = None, max_num_proc: Optional[int] = None,
        slots: Optional[int] = None, reset_limit: Optional[int] = None,
        cooldown_range: Optional[Sequence[int]] = None, hosts: Optional[str] = None, hostfile: Optional[str] = None,
        host_discovery_script: Optional[str] = None, start_timeout: Optional[int] = None,
        ssh_port: Optional[int] = None, ssh_identity_file: Optional[str] = None,
        disable_cache: Optional[bool] = None, output_filename: Optional[str] = None,
        verbose: Optional[bool] = None, use_gloo: Optional[bool] = None, use_mpi: Optional[bool] = None,
        mpi_args: Optional[str] = None, network_interface: Optional[str] = None,
        network_interfaces: Optional[str] = None, executable: Optional[str] = None, np: Optional[int] = None,
        min_np: Optional[int] = None, max_np: Optional[int] = None) -> list[Any]:
    """Runs func(*args, **kwargs) in num_proc processes of this host; returns their results in rank order.

    func, args and results travel by cloudpickle. What ranks print appears here, tagged as by lightccrun.
    start_timeout: seconds that ranks wait for each other in init. output_filename: a directory, as lightccrun's flag.
    executable: the Python that runs the ranks (default: this one). np is a deprecated name of num_proc.
    use_gloo and use_mpi choose nothing, since lightcc has one controller. ssh_*, mpi_args, network_interface(s) and
    disable_cache concern other hosts and have no effect here.

    Raises RuntimeError if a rank fails: it names the rank and ends in its traceback. ValueError: the elastic
    arguments, which this version does not support; hosts and hostfile, or use_gloo and use_mpi, both given; a
    host that is not this one; too few slots.

    >>> import lightcc, os
    >>> lightcc.run(lambda base: base + int(os.environ["HOROVOD_RANK"]), args=(10,), num_proc=2)
    [10, 11]
    """
    import cloudpickle  # here, so that starting lightccrun does not pay for it

    num_proc = _renamed("np", np, "num_proc", num_proc)
    _renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    elastic = {
        "min_num_proc": _renamed("min_np", min_np, "min_num_proc", min_num_proc),
        "max_num_proc": _renamed("max_np", max_np, "max_num_proc", max_num_proc),
        "slots": slots, "reset_limit": reset_limit, "cooldown_range": cooldown_range,
        "host_discovery_script": host_discovery_script,
    }
    for name, value in elastic.items():
        if value is not None:
            raise ValueError(f"run: {name} asks for elastic training, which is not supported in this version")
    if use_gloo and use_mpi:
        raise ValueError("run: give either use_gloo or use_mpi, not both")
    _hosts.check(num_proc, hosts, hostfile)

    with contextlib.ExitStack() as stack:
        def memory(name: str) -> int:
            fd = os.memfd_create(f"lightcc-{name}")
            stack.callback(os.close, fd)
            return fd

        payload = memory("function")
        with open(payload, "wb", closefd=False) as file:
            pickle.dump(sys.path, file)  # first: func may come from a module that only our path finds
            cloudpickle.dump((func, tuple(args), dict(kwargs or {})), file)
        results = [memory(f"result-{rank}") for rank in range(num_proc)]
        settings = _path_to_us()
        if start_timeout is not None:
            settings["HOROVOD_START_TIMEOUT"] = str(start_timeout)
        job = Job(
            num_proc,
            command=lambda rank: [executable or sys.executable, "-m", "lightcc.runner.task", str(os.getpid()),
                                  str(payload), str(results[rank])],
            descriptors=lambda rank: (payload, results[rank]),
            settings=settings,
            output_dir=output_filename, verbose=bool(verbose))
        in_main_thread = threading.current_thread() is threading.main_thread()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        outcome = supervise(job, _descriptor(sys.stdout, 1), _descriptor(sys.stderr, 2),
                            (signal.SIGINT,) if in_main_thread else ())
        if outcome.cause:
            _fail(outcome, results)
        return [_value(rank, fd) for rank, fd in enumerate(results)]


def _fail(outcome: Outcome, results: Sequence[int]) -> NoReturn:
    if outcome.cause.rank is None and outcome.cause.code == -signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.cause.code > 0:
        # A rank that raised first may end last (frameworks take their time to unload), so their own clocks decide.
        records = [(rank, record.read(fd)) for rank, fd in enumerate(results)]
        errors = [(found.time_s, rank, found.body.decode()) for rank, found in records if found and found.is_error]
        if errors:
            _, rank, text = min(errors)
            first = "" if rank == outcome.cause.rank else f"rank {rank} raised an exception; then "
            raise RuntimeError(f"run: {first}{outcome.text}\n\n{text}")
    raise RuntimeError(f"run: {outcome.text}")


def _value(rank: int, fd: int) -> Any:
    found = record.read(fd)
    if found is None:
        raise RuntimeError(f"run: rank {rank} exited with code 0 before the function returned, so it has no result")
    try:
        return pickle.loads(found.body)
    except Exception as error:
        raise RuntimeError(f"run: the result of rank {rank} cannot be unpickled here: {error!r}") from error


def _renamed(old: str, old_value: Any, new: str, new_value: Any) -> Any:
    if old_value is None:
        return new_value
    warnings.warn(f"run: {old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
    return old_value


def _path_to_us() -> dict[str, str]:
    """PYTHONPATH with this package's home if Python would not find it there by itself (a source tree)."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if home in [*site.getsitepackages(), site.getusersitepackages()]:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


def _descriptor(stream: Any, default: int) -> int:
    """The descriptor behind sys.stdout or sys.stderr; a stream without one (StringIO) is passed by."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # None, none, closed
        return default
