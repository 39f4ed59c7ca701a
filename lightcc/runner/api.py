"""run(): a function in many processes, from Python. On this host the function travels to the ranks, and their results
back, in files in memory that only they inherit (run_files.py): nothing on disk, no ports, no pipe that could fill up,
and nothing is unpickled that another process could have written. To other hosts they go over the connection with the
agent there, as messages (result_transfer.py).
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional, Union

from lightcc.elastic.options import Options
from lightcc.launch import hosts as _hosts
from lightcc.launch import nesting, network, pickling, remote, results
from lightcc.launch.local import Job, pythonpath_setting
from lightcc.launch.run_files import RunFiles
from lightcc.launch.seconds import from_environment
from lightcc.launch.supervise import supervise
from lightcc.launch.termination import TERM_GRACE_S


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
    """Runs func(*args, **kwargs) in num_proc processes; returns their results in rank order. With min_num_proc,
    max_num_proc or host_discovery_script in processes that come and go.

    func, args and results travel by cloudpickle; modules that func needs are found along this process's sys.path. What
    ranks print appears here, tagged as by lightccrun. OMP_NUM_THREADS, if it is not set, is the cores of a host divided
    by its ranks.

    hosts: "node1:4,node2:4", filled in this order; hostfile: a file of lines "node1 slots=4"; default: all on this
    host. Others are reached by ssh with ssh_port and ssh_identity_file, or by what LIGHTCC_LAUNCH_COMMAND says
    (docs/running.md). start_timeout: seconds that hosts may take to answer, and that ranks wait for each other in
    init; default HOROVOD_START_TIMEOUT, else 30. network_interfaces: "eth0,eth1", those that carry the traffic between
    hosts, all at once; default: the one that leads to rank 0. output_filename: a directory, as lightccrun's flag.
    verbose: say what is started where.
    executable: the Python that runs the ranks (default: this one). np, min_np, max_np and network_interface are
    deprecated names of num_proc, min_num_proc, max_num_proc and network_interfaces. use_gloo and use_mpi choose
    nothing, since lightcc has one controller; mpi_args and disable_cache have no effect.

    Elastic jobs (docs/elastic.md): num_proc: slots that must be there to begin; default min_num_proc, else 1.
    min_num_proc: fewest workers that go on (default num_proc); max_num_proc: most workers (default: all slots).
    host_discovery_script: a command that prints the hosts, instead of hosts; slots: of a host that it prints without a
    number. reset_limit: most resets. cooldown_range: (shortest, longest), seconds for which a host whose worker failed
    is not used; default: for ever. The first worker that returns ends the job, while the others may return too; the
    result is what ranks 0 to min_num_proc - 1 return, ranks of the last world. If func never calls init(), workers
    count in the order of their start.

    Raises RuntimeError if a host cannot be reached or a rank fails: it names the host and the rank and ends in the
    rank's traceback. An elastic job raises it if too few workers are left, with the traceback of the exception that was
    raised first, or if a rank whose result is asked for has not returned. ValueError: arguments that contradict each
    other, numbers of an elastic job that are none, too few slots, a LIGHTCC_LAUNCH_COMMAND without {command}, variables
    that are no seconds.
    TypeError: func is no function, or something of the call cannot be pickled; it names the variable.
    KeyboardInterrupt after Ctrl-C, when all have ended.

    >>> import lightcc, os
    >>> lightcc.run(lambda base: base + int(os.environ["HOROVOD_RANK"]), args=(10,), num_proc=2)
    [10, 11]
    >>> def total():
    ...     import numpy as np, lightcc.numpy as hvd
    ...     hvd.init()
    ...     return hvd.allreduce(np.ones(1), op=hvd.Sum).tolist()
    >>> lightcc.run(total, num_proc=2, min_num_proc=1)  # what one rank returns, since one may be left
    [[2.0]]
    """
    pickling.check(func, args, kwargs)
    if use_gloo and use_mpi:
        raise ValueError("run: give either use_gloo or use_mpi, not both")
    network_interfaces = _renamed("network_interface", network_interface, "network_interfaces", network_interfaces)
    num_proc = _renamed("np", np, "num_proc", num_proc)
    elastic = _options(
        num_proc=num_proc, hosts=hosts, hostfile=hostfile,
        min_num_proc=_renamed("min_np", min_np, "min_num_proc", min_num_proc),
        max_num_proc=_renamed("max_np", max_np, "max_num_proc", max_num_proc), slots_per_host=slots,
        reset_limit=reset_limit, blacklist_cooldown_range=cooldown_range, host_discovery_script=host_discovery_script)
    template = _launch_command()
    if nested := nesting.remark(os.environ):
        warnings.warn(f"run: {nested}", stacklevel=2)

    def is_here(host: str) -> bool:
        return network.is_here(host, resolve=not template)

    places = [] if elastic.is_elastic else _hosts.places(num_proc, hosts, hostfile, is_here)
    settings = pythonpath_setting()
    if start_timeout is not None:
        settings["HOROVOD_START_TIMEOUT"] = str(start_timeout)
    timeout_s = float(settings.get("HOROVOD_START_TIMEOUT") or from_environment("HOROVOD_START_TIMEOUT", 30))
    if elastic.is_elastic or not all(place.here for place in places):
        settings.update(_interfaces(network_interfaces))
    if not elastic.is_elastic:
        settings.update(_hosts.meeting_settings(
            places, settings.get("LIGHTCC_IFACE") or os.environ.get("LIGHTCC_IFACE", ""),
            os.environ.get("LIGHTCC_PORT_RANGE", "")))

    def agent_command(host: str) -> list[str]:
        return (remote.template_command(template, host) if template
                else remote.ssh_command(host, timeout_s, ssh_port, ssh_identity_file))

    with RunFiles(place.rank for place in places) as run_files:
        with open(run_files.function, "wb", closefd=False) as file:
            pickling.write(file, func, args, kwargs)
        job = Job(places, lambda rank: [executable or sys.executable, "-m", "lightcc.launch.task"], run_files=run_files,
                  settings=settings, output_dir=output_filename, verbose=bool(verbose), agent_command=agent_command,
                  start_timeout_s=timeout_s, term_grace_s=from_environment("LIGHTCC_GRACE_PERIOD", TERM_GRACE_S))
        outputs = _descriptor(sys.stdout, 1), _descriptor(sys.stderr, 2)
        signals = (signal.SIGINT,) if threading.current_thread() is threading.main_thread() else ()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        if elastic.is_elastic:
            return _drive(job, run_files, elastic, outputs, signals, is_here)
        return results.values(supervise(job, *outputs, signals), places, run_files)


def _options(**said: Any) -> Options:
    """Checked as lightccrun's flags are."""
    if said["min_num_proc"] is not None and said["num_proc"] == 1:  # which is the default too
        said["num_proc"] = None
    names = {"slots_per_host": "slots", "blacklist_cooldown_range": "cooldown_range"}
    options = Options(lambda name: names.get(name, name), **said)
    options.check()
    return options


def _drive(job: Job, run_files: RunFiles, elastic: Options, outputs: tuple[int, int], signals: Sequence[int],
           is_here: Callable[[str], bool]) -> list[Any]:
    from lightcc.elastic import driver  # here, so that other jobs do not pay for it
    from lightcc.elastic import results as elastic_results

    limits = elastic.limits()
    outcome = driver.drive(job, limits, elastic.discovery(), *outputs, signals, is_here=is_here)
    return elastic_results.values(outcome, limits.min_num_proc, run_files)


def _launch_command() -> str:
    """Instead of ssh. As lightccrun's --launch-command, for which run() has no argument, since it has Horovod's."""
    text = os.environ.get("LIGHTCC_LAUNCH_COMMAND", "")
    try:
        return text and remote.checked_template(text)
    except ValueError as error:
        raise ValueError(f"run: LIGHTCC_LAUNCH_COMMAND: {error}") from None


def _interfaces(names: Union[str, Sequence[str], None]) -> dict[str, str]:
    """The setting that has ranks use these."""
    names = names if names is None or isinstance(names, str) else ",".join(names)
    return {"LIGHTCC_IFACE": f"={names}"} if names else {}


def _renamed(old: str, old_value: Any, new: str, new_value: Any) -> Any:
    if old_value is None:
        return new_value
    warnings.warn(f"run: {old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)
    return old_value


def _descriptor(stream: Any, default: int) -> int:
    """The descriptor behind sys.stdout or sys.stderr; a stream without one (StringIO) is passed by."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # None, none, closed
        return default
