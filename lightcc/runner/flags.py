"""The flags that become variables of every rank. One table, from which lightccrun's parser is made and by which a
configuration file is read (config_file.py)."""

import argparse
import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple, Optional, Union

LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


def _whole(value: Any) -> str:
    if int(value) < 0:
        raise ValueError
    return str(int(value))


def _number(value: Any, most: float = math.inf) -> str:
    number = float(value)
    if not 0 <= number <= most or math.isinf(number):
        raise ValueError
    return str(number)


def _level(value: str) -> str:
    if value.lower() not in LOG_LEVELS:
        raise ValueError
    return value.upper()


class Kind(NamedTuple):
    """What a value may be."""

    expected: str  # in words
    types: tuple[type, ...]  # in a configuration file
    text: Callable[[Any], str]  # the variable's, of a flag's text or of a value of these types; ValueError: it is none

    def of_flag(self, value: str) -> str:
        try:
            return self.text(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{value}' is not {self.expected}") from None


WHOLE = Kind("a whole number, 0 or more", (int,), _whole)
MEGABYTES = Kind("a whole number of MB, 0 or more", (int,), lambda value: str(int(_whole(value)) << 20))
NUMBER = Kind("a number, 0 or more", (int, float), _number)
SHARE = Kind("a number from 0 to 1", (int, float), lambda value: _number(value, 1))
TEXT = Kind("text", (str,), str)
LEVEL = Kind("one of " + ", ".join(LOG_LEVELS).upper(), (str,), _level)


class Value(NamedTuple):
    """A flag with a value."""

    flag: str
    variable: str
    kind: Kind
    help: str
    key: str = ""  # section.name in a configuration file

    def text_of(self, value: Any) -> str:
        """The text for a value in a configuration file; ValueError if the flag takes no such value."""
        if type(value) not in self.kind.types:  # True is no number here
            raise ValueError
        return self.kind.text(value)

    @property
    def expected(self) -> str:
        return self.kind.expected


class Switch(NamedTuple):
    """Two flags of which at most one may be given."""

    on: str
    off: str
    variable: str
    help_on: str  # "" hides the flag
    help_off: str
    key: str
    on_text: str = "1"
    off_text: str = "0"

    @property
    def expected(self) -> str:
        return "true or false"

    def text_of(self, value: Any) -> str:
        if not isinstance(value, bool):
            raise ValueError
        return self.on_text if value else self.off_text


SETTINGS: Sequence[Union[Value, Switch]] = (
    Value("--start-timeout", "HOROVOD_START_TIMEOUT", WHOLE,
          "seconds that hosts may take to answer, and ranks to meet in init; default 30"),
    Value("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", MEGABYTES,
          "most MB in one fused collective; default 128", "params.fusion_threshold_mb"),
    Value("--cycle-time-ms", "HOROVOD_CYCLE_TIME", NUMBER, "without effect: there is no cycle",
          "params.cycle_time_ms"),
    Value("--cache-capacity", "HOROVOD_CACHE_CAPACITY", WHOLE, "requests remembered per process set; default 1024",
          "params.cache_capacity"),
    Switch("--hierarchical-allreduce", "--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE",
           "what happens anyway: all-reduces between hosts are hierarchical", "all-reduces between hosts are flat",
           "params.hierarchical_allreduce"),
    Switch("--hierarchical-allgather", "--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER",
           "what happens anyway: all-gathers between hosts go by host", "all-gathers between hosts are flat",
           "params.hierarchical_allgather"),
    Switch("--torus-allreduce", "--no-torus-allreduce", "HOROVOD_TORUS_ALLREDUCE",
           "as --hierarchical-allreduce", "as --no-hierarchical-allreduce", "params.torus_allreduce"),
    Switch("--autotune", "--no-autotune", "HOROVOD_AUTOTUNE",
           "all-reduces between hosts try a second algorithm while training runs, and keep the quicker", "",
           "autotune.enabled"),
    Value("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", TEXT, "file in which rank 0 writes what --autotune measures",
          "autotune.log_file"),
    Value("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", WHOLE,
          "first samples of each size, which do not count; default 3", "autotune.warmup_samples"),
    Value("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", WHOLE,
          "all-reduces of one size that make a sample; default 10", "autotune.steps_per_sample"),
    Value("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", WHOLE,
          "most samples of each size; default 20", "autotune.bayes_opt_max_samples"),
    Value("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", SHARE,
          "without effect: there is no Gaussian process", "autotune.gaussian_process_noise"),
    Value("--timeline-filename", "HOROVOD_TIMELINE", TEXT,
          "file for a timeline of rank 0; of each rank if {rank} is in it", "timeline.filename"),
    Switch("--timeline-mark-cycles", "--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES",
           "mark every agreed batch in the timeline", "", "timeline.mark_cycles"),
    Switch("--stall-check", "--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "", "do not look for stalled ranks",
           "stall_check.enabled", "0", "1"),
    Value("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", WHOLE, "warn after; default 60",
          "stall_check.warning_time_seconds"),
    Value("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", WHOLE,
          "end the job after; default 0 = never", "stall_check.shutdown_time_seconds"),
    Switch("--mpi-threads-disable", "--no-mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", "without effect", "",
           "library_options.mpi_threads_disable"),
    Value("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS", WHOLE, "streams of a GPU on which NCCL runs by turns",
          "library_options.num_nccl_streams"),
    Value("--thread-affinity", "HOROVOD_THREAD_AFFINITY", WHOLE, "without effect", "library_options.thread_affinity"),
    Value("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", WHOLE,
          "without effect: see --start-timeout and --stall-check-shutdown-time-seconds",
          "library_options.gloo_timeout_seconds"),
    Value("--log-level", "HOROVOD_LOG_LEVEL", LEVEL, "TRACE to FATAL; default WARNING", "logging.level"),
    Switch("--log-with-timestamp", "--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", "", "no times in the log",
           "logging.with_timestamp", "0", "1"),
)
OLD_NAMES = {"--log-with-timestamp": "--no-log-hide-timestamp", "--log-without-timestamp": "--log-hide-timestamp"}

WITHOUT_EFFECT = {
    "--mpi": "ranks need no MPI, and lightccrun starts them itself; mpirun can start them too (docs/running.md)",
    "--jsrun": "lightccrun starts the ranks itself, by ssh or --launch-command",
    "--mpi-args": "no mpirun is started; the whole environment goes to all ranks",
    "--binding-args": "ranks are not bound to cores; taskset or numactl before the command can do it",
}


def add_to(top: argparse.ArgumentParser) -> None:
    """The parser's namespace gets `settings`, variables and their texts, and `remarks`, lines for the user by flag."""
    top.set_defaults(settings={}, remarks={})
    for setting in SETTINGS:
        if isinstance(setting, Value):
            top.add_argument(setting.flag, action=_Set, variable=setting.variable, type=setting.kind.of_flag,
                             metavar="VALUE", help=setting.help)
        else:
            pair = top.add_mutually_exclusive_group()
            for flag, text, words in ((setting.on, setting.on_text, setting.help_on),
                                      (setting.off, setting.off_text, setting.help_off)):
                pair.add_argument(flag, action=_Set, variable=setting.variable, const=text, nargs=0,
                                  help=words or argparse.SUPPRESS)
                if flag in OLD_NAMES:
                    pair.add_argument(OLD_NAMES[flag], action=_Set, variable=setting.variable, const=text, nargs=0,
                                      new_name=flag, help=argparse.SUPPRESS)
    top.add_argument("--tcp", action=_Set, variable="NCCL_IB_DISABLE", const="1", nargs=0,
                     help="keep NCCL off InfiniBand too; lightcc itself uses TCP between hosts")


def remark(namespace: argparse.Namespace, flag: str, text: str) -> None:
    """Once, however often the flag is there."""
    namespace.remarks = {**namespace.remarks, flag: text}


def without_effect(what: str, flag: str) -> str:
    """The remark on `what`, which the user wrote and which means that flag."""
    return f"{what} has no effect: {WITHOUT_EFFECT[flag]}"


class _Set(argparse.Action):
    """Notes variable = value among the settings."""

    def __init__(self, option_strings: Sequence[str], dest: str, variable: str, new_name: str = "",
                 **rest: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, **rest)
        self.variable, self.new_name = variable, new_name

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: Optional[str] = None) -> None:
        namespace.settings = {**namespace.settings, self.variable: values if self.const is None else self.const}
        if self.new_name:
            remark(namespace, self.option_strings[0], f"{self.option_strings[0]} is deprecated; use {self.new_name}")


class WithoutEffect(argparse.Action):
    """Takes the flag, and remarks that it has no effect."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: Optional[str] = None) -> None:
        flag = self.option_strings[0]
        remark(namespace, flag, without_effect(flag, flag))
