"""lightccrun's flags of elastic jobs."""
import argparse
from dataclasses import fields
from typing import Any, Callable

from lightcc.elastic.options import Options, count, whole
from lightcc.launch.seconds import seconds

_FLAGS = {"num_proc": "-np", "min_num_proc": "--min-np", "max_num_proc": "--max-np", "hosts": "-H"}


def add_to(top: argparse.ArgumentParser) -> None:
    flags = top.add_argument_group("elastic jobs", "those with --min-np, --max-np or --host-discovery-script")
    flags.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=of_flag(count), metavar="N",
                       help="fewest workers that go on when others are lost; default: -np")
    flags.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=of_flag(count), metavar="N",
                       help="most workers that run; default: all slots of the hosts")
    flags.add_argument("--slots-per-host", type=of_flag(count), metavar="N",
                       help="workers of a host that the script names without a number")
    flags.add_argument("--host-discovery-script", metavar="SCRIPT",
                       help='a command that prints a line "host:slots" for each host; it is run every second')
    flags.add_argument("--elastic-timeout", type=of_flag(seconds), metavar="SECONDS",
                       help="that the job waits for -np slots at its start, and for --min-np workers after a loss; "
                            "default 600")
    flags.add_argument("--reset-limit", type=of_flag(whole), metavar="N",
                       help="most resets of the job; default: no limit")
    flags.add_argument("--blacklist-cooldown-range", nargs=2, type=of_flag(seconds), metavar=("MIN", "MAX"),
                       help="seconds for which a host whose worker failed is not used, the first time and at most; "
                            "they double; default: for ever")
    flags.add_argument("--failures-per-host", type=of_flag(count), metavar="N",
                       help="failures of a host's workers until it is not used any more; default 1")
    flags.add_argument("--newcomer-timeout", type=of_flag(seconds), metavar="SECONDS",
                       help="that workers of new hosts wait for the others that were discovered with them, after the "
                            "first of them is ready, so that they come in together; default 30")
    flags.add_argument("--worker-timeout", type=of_flag(seconds), metavar="SECONDS",
                       help="a worker that does not answer for so long (stopped, stuck in the kernel) is killed; "
                            "default 30")


def options(args: argparse.Namespace) -> Options:
    said = {field.name: getattr(args, field.name) for field in fields(Options) if field.name != "called"}
    return Options(_flag, **said)


def _flag(name: str) -> str:
    return _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def of_flag(kind: Callable[[Any], Any]) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return value
