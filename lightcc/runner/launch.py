"""lightccrun: the command line. Turns flags into a Job and settings, hands it to supervise, reports the end."""

import argparse
import importlib.util
import os
import shlex
import signal
import socket
from collections.abc import Sequence
from typing import Any, Optional

from lightcc._version import __version__
from lightcc.runner import hosts
from lightcc.runner.life import exit_code
from lightcc.runner.local import Job, StartError
from lightcc.runner.supervise import supervise

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def whole(text: str) -> str:
    return str(int(text))


def megabytes(text: str) -> str:
    return str(int(text) << 20)


def log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(LOG_LEVELS).upper()}")
    return text.lower()


# Flags that set a variable in every rank: flag, variable, reader of its value or the value itself, help.
SETTINGS = [
    ("--start-timeout", "HOROVOD_START_TIMEOUT", whole, "seconds that ranks wait for each other in init; default 30"),
    ("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", megabytes, "most MB in one fused collective; default 128"),
    ("--cache-capacity", "HOROVOD_CACHE_CAPACITY", whole, "requests remembered per process set; default 1024"),
    ("--timeline-filename", "HOROVOD_TIMELINE", str, "file for a timeline of rank 0; of each rank if {rank} is in it"),
    ("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "1", "mark every agreed batch in the timeline"),
    ("--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "0", argparse.SUPPRESS),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1", "do not look for stalled ranks"),
    ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0", argparse.SUPPRESS),
    ("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", whole, "warn after; default 60"),
    ("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", whole,
     "end the job after; default 0 = never"),
    ("--log-level", "HOROVOD_LOG_LEVEL", log_level, "TRACE to FATAL; default WARNING"),
    ("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "0", argparse.SUPPRESS),
    ("--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", "1", "no times in the log"),
]


class _Set(argparse.Action):
    """Notes variable = value among the settings."""

    def __init__(self, option_strings: Sequence[str], dest: str, variable: str, **rest: Any) -> None:
        super().__init__(option_strings, dest, **rest)
        self.variable = variable

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: Optional[str] = None) -> None:
        namespace.settings = {**namespace.settings, self.variable: values if self.const is None else self.const}


class _CheckBuild(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: Optional[str] = None) -> None:
        print(check_build())
        parser.exit()


def check_build() -> str:
    """What can be used here. Finds frameworks without importing them."""
    frameworks = [("TensorFlow", "tensorflow"), ("PyTorch", "torch"), ("Keras", "keras"), ("NumPy", "numpy")]
    rows = "\n".join(f"    [{'X' if importlib.util.find_spec(module) else ' '}] {name}" for name, module in frameworks)
    return (f"lightcc v{__version__}:\n\nAvailable Frameworks:\n{rows}\n\nAvailable Controllers:\n    [X] lightcc\n\n"
            "Available Tensor Operations:\n    [X] lightcc shared memory")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="lightccrun", allow_abbrev=False, usage="lightccrun -np N [options] command [arguments]",
        description="Runs a command in N processes that train together.")
    top.set_defaults(settings={})
    top.add_argument("-v", "--version", action="version", version=__version__)
    top.add_argument("-np", "--num-proc", type=int, metavar="N", help="number of processes")
    top.add_argument("-cb", "--check-build", action=_CheckBuild, nargs=0, help="print what can be used here and exit")
    top.add_argument("-H", "--hosts", help="host1:slots,host2:slots; default localhost:N (for now this host only)")
    top.add_argument("-hostfile", "--hostfile", metavar="FILE", help='lines of "host slots=n"')
    top.add_argument("--gloo", "--mpi", action="store_true", dest="controller",
                     help="accepted for horovodrun's sake; lightcc has one controller")
    top.add_argument("--verbose", action="store_true", help="say what is started")
    top.add_argument("--output-filename", metavar="DIR",
                     help="also write the output of rank n, untagged, to DIR/rank.<n>/stdout and stderr")
    top.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
                     help="time before every line of output")
    for flag, variable, value, text in SETTINGS:
        takes = {"type": value, "metavar": "VALUE"} if callable(value) else {"const": value, "nargs": 0}
        top.add_argument(flag, action=_Set, variable=variable, dest=variable, default=argparse.SUPPRESS, help=text,
                         **takes)
    top.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")
    return top


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Returns the exit code: 0, that of the first rank that failed, 128 + signal, 127 (no such command), 2 (usage)."""
    _open_standard_descriptors()
    args = parser().parse_args(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.num_proc is None:
        return _say("say how many processes to start: -np N", 2)
    if not command:
        return _say("say which command to run: lightccrun -np N command", 2)
    try:
        hosts.check(args.num_proc, args.hosts, args.hostfile)
    except (ValueError, OSError) as error:
        return _say(str(error), 2)
    if args.verbose:
        settings = " ".join(f"{name}={value}" for name, value in args.settings.items())
        _say(f"{args.num_proc} x {shlex.join(command)} on {socket.gethostname()} {settings}".rstrip())
    job = Job(args.num_proc, lambda rank: command, settings=args.settings, output_dir=args.output_filename,
              timestamps=args.prefix_output_with_timestamp, verbose=args.verbose, bind_at_fork=True)
    try:
        outcome = supervise(job, 1, 2, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    except StartError as error:
        return _say(str(error), error.exit_code)
    except OSError as error:
        return _say(f"cannot write the output: {error}", 1)
    for line in outcome.text.splitlines():
        _say(line)
    return outcome.exit_code


def _open_standard_descriptors() -> None:
    """If we were started with closed ones (>&-), pipes of ranks would get the numbers 0 to 2."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _say(text: str, code: int = 0) -> int:
    try:
        os.write(2, f"lightccrun: {text}\n".encode())
    except OSError:  # nobody listens; the exit code says it too
        return code or exit_code(-signal.SIGPIPE)
    return code
