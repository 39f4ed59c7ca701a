"""lightccrun: the command line. Turns flags into a Job and settings, hands it to supervise, reports the end. The flags
that only set variables are those of flags.py."""

import argparse
import difflib
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable, NoReturn, Optional

from lightcc import as_horovod
from lightcc._version import __version__
from lightcc.elastic import command_line
from lightcc.launch import hosts, jax_programs, nccl_plugin, nesting, network, remote
from lightcc.launch.discovery import DiscoveryError
from lightcc.launch.local import Job, StartError
from lightcc.launch.output import printable
from lightcc.launch.seconds import from_environment, seconds
from lightcc.launch.supervise import supervise
from lightcc.launch.termination import TERM_GRACE_S, Outcome, exit_code
from lightcc.runner import flags

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def template(text: str) -> str:
    try:
        return remote.checked_template(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check_build(top: argparse.ArgumentParser, harp: bool) -> NoReturn:
    from lightcc.runner import check_build  # here, so that starting a job does not pay for it

    text, fault = check_build.report(harp)
    print(text, end="", flush=True)
    top.exit(1 if fault else 0, f"{top.prog}: {fault}\n" if fault else None)


class _Interfaces(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any,
                 option_string: Optional[str] = None) -> None:
        namespace.network_interfaces = [*namespace.network_interfaces, *values.split(",")]
        (flag,) = self.option_strings
        if flag != "--network-interfaces":
            flags.remark(namespace, flag, f"{flag} is deprecated; use --network-interfaces")


def parser() -> argparse.ArgumentParser:
    # No abbreviations: argparse would look for them among the command's own arguments too, and end where one could be
    # several of ours.
    top = argparse.ArgumentParser(
        prog="lightccrun", allow_abbrev=False, usage="lightccrun -np N [options] command [arguments]",
        description="Runs a command in N processes that train together.")
    top.add_argument("-v", "--version", action="version", version=__version__)
    top.add_argument("-cb", "--check-build", action="store_true", help="print what can be used here and exit")
    top.add_argument("-np", "--num-proc", type=int, metavar="N",
                     help="number of processes; default, under LSF only: the slots of its allocation")
    top.add_argument("--verbose", action="store_true", help="say what is started where and how")
    top.add_argument("--as-horovod", action="store_true",
                     help="in every Python that the command starts, import horovod means lightcc")
    top.add_argument("--jax", action="store_true",
                     help="programs of JAX need no import: their collectives run over lightcc (docs/jax.md)")
    top.add_argument("--harp", action="store_true",
                     help="NCCL uses HARP between hosts: each host's own plugin is its NCCL_NET_PLUGIN (docs/nccl.md)")
    top.add_argument("--config-file", metavar="FILE", help="settings in YAML; flags win over them (docs/running.md)")
    top.add_argument("--output-filename", metavar="DIR",
                     help="also write the output of rank n, untagged, to DIR/rank.<n>/stdout and stderr")
    top.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
                     help="time before every line of output")
    _add_hosts(top)
    flags.add_to(top)
    controller = top.add_mutually_exclusive_group()
    for flag, text in (("--gloo", "what happens anyway: ranks need no MPI"), ("--mpi", "without effect"),
                       ("--jsrun", "without effect")):
        controller.add_argument(flag, action="store_const", dest="controller", const=flag.strip("-"), help=text)
    top.add_argument("--mpi-args", action=flags.WithoutEffect, metavar="TEXT", help="without effect")
    top.add_argument("--binding-args", action=flags.WithoutEffect, metavar="TEXT", help="without effect")
    command_line.add_to(top)
    top.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")
    return top


def _add_hosts(top: argparse.ArgumentParser) -> None:
    which = top.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", help="host1:slots,host2:slots, filled in this order; default localhost:N")
    which.add_argument("-hostfile", "--hostfile", metavar="FILE", help='lines of "host slots=n"')
    top.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="of ssh on the other hosts")
    top.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="ssh's private key")
    top.add_argument("--launch-command", type=template, metavar="TEMPLATE",
                     default=os.environ.get("LIGHTCC_LAUNCH_COMMAND") or None,
                     help="instead of ssh: words in which {host} is replaced, and {command}, which stays one word, a "
                          "line for a shell: 'docker exec -i {host} sh -c {command}'")
    for flag, text in (("--network-interfaces", "eth0,eth1: those that hosts use between them, all at once; default: "
                                                "the one that leads to rank 0"),
                       ("--network-interface", argparse.SUPPRESS)):
        top.add_argument(flag, action=_Interfaces, default=[], dest="network_interfaces", metavar="NAMES", help=text)
    top.add_argument("--grace-period", type=command_line.of_flag(seconds), metavar="SECONDS",
                     default=os.environ.get("LIGHTCC_GRACE_PERIOD") or str(TERM_GRACE_S),
                     help="from the first signal that ranks get, to SIGKILL: time for a checkpoint; default 5")
    top.add_argument("--disable-cache", action="store_true", help="what happens anyway: no checks of hosts are cached")


def parse_args(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """What the flags and the configuration file say together; flags win. Raises ValueError or OSError if that cannot
    be; ends the program for what argparse refuses."""
    top = parser()
    args, unknown = top.parse_known_args(arguments)
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}{_did_you_mean(top, unknown)}")
    if args.check_build:
        _check_build(top, args.harp)
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.config_file:
        from lightcc.runner import config_file  # here, so that other jobs do not pay for it

        found = config_file.load(args.config_file)
        args.settings = {**found.variables, **args.settings}
        if args.controller is None and found.controller == "mpi":
            flags.remark(args, "--mpi", flags.without_effect(f"controller: mpi in {args.config_file}", "--mpi"))
    if args.controller in ("mpi", "jsrun"):
        flags.remark(args, f"--{args.controller}", flags.without_effect(f"--{args.controller}", f"--{args.controller}"))
    if not args.hosts and not args.hostfile and (allocated := hosts.of_lsf(os.environ)):
        args.hosts = ",".join(f"{host.name}:{host.slots}" for host in allocated)
        if args.num_proc is None:
            args.num_proc = sum(host.slots for host in allocated)
    args.elastic = command_line.options(args)
    args.elastic.check()
    args.num_proc = args.elastic.num_proc
    if args.num_proc is None:
        raise ValueError(_without_number(args.command))
    if not args.command:
        raise ValueError("say which command to run: lightccrun -np N command")
    if args.as_horovod:
        args.settings.update(as_horovod.environment())
    if args.jax:
        args.settings.update(jax_programs.environment(args.settings))
    if args.harp:
        args.settings.update(nccl_plugin.SETTINGS)
    if args.network_interfaces:
        args.settings["LIGHTCC_IFACE"] = "=" + ",".join(args.network_interfaces)
    return args


def _did_you_mean(top: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """The flags that are spelt most like these."""
    known = [flag for action in top._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
    found = []
    for word in unknown:
        flag = word.partition("=")[0].replace("_", "-")
        longer = [one for one in known if len(flag) > 3 and one.startswith(flag)]
        found += (longer or difflib.get_close_matches(flag, known))[:1] if flag.startswith("-") else []
    return f"; did you mean {', '.join(dict.fromkeys(found))}?" if found else ""


def _without_number(command: Sequence[str]) -> str:
    text = "say how many processes to start: -np N"
    late = [i for i, word in enumerate(command) if word in ("-np", "--num-proc") or word.startswith("--num-proc=")]
    if not late:
        return text
    begin = late[0]
    end = begin + (1 if "=" in command[begin] else 2)
    better = ["lightccrun", *command[begin:end], *command[:begin], *command[end:]]
    return (f"{text}. Options of lightccrun come before the command, what follows it is the command's own; did you "
            f"mean: {shlex.join(better)}")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Returns the exit code: 0, that of the first rank that failed, 128 + signal, 127 (no such command), 2 (usage)."""
    _open_standard_descriptors()
    try:
        args = parse_args(arguments)
        settings, command = args.settings, args.command
        timeout_s = float(settings.get("HOROVOD_START_TIMEOUT") or from_environment("HOROVOD_START_TIMEOUT", 30))
        if args.elastic.is_elastic:
            return _drive(args, timeout_s)
        # Names that are not ssh's (of containers, of pods) are nothing to ask the system about.
        places = hosts.places(args.num_proc, args.hosts, args.hostfile,
                              lambda name: network.is_here(name, resolve=not args.launch_command))
        settings.update(hosts.meeting_settings(
            places, settings.get("LIGHTCC_IFACE") or os.environ.get("LIGHTCC_IFACE", ""),
            os.environ.get("LIGHTCC_PORT_RANGE", "")))
    except (ValueError, OSError) as error:
        return _say(str(error), 2)
    _say_remarks(args)
    if args.verbose:
        where = ", ".join(dict.fromkeys(socket.gethostname() if place.here else place.host for place in places))
        variables = " ".join(f"{name}={value}" for name, value in settings.items())
        _say(f"{args.num_proc} x {shlex.join(command)} on {where} {variables}".rstrip())
    job = replace(_job(args, timeout_s), places=places, stdin=subprocess.PIPE if os.isatty(0) else 0)
    return _outcome_of(lambda: supervise(job, 1, 2, SIGNALS))


def _job(args: argparse.Namespace, timeout_s: float) -> Job:
    """What is said of it that does not depend on who its ranks are."""
    return Job([], lambda rank: args.command, settings=args.settings, output_dir=args.output_filename,
               timestamps=args.prefix_output_with_timestamp, verbose=args.verbose, bind_at_fork=True,
               agent_command=lambda host: _agent_command(args, host, timeout_s), start_timeout_s=timeout_s,
               term_grace_s=args.grace_period)


def _drive(args: argparse.Namespace, timeout_s: float) -> int:
    from lightcc.elastic import driver  # here, so that other jobs do not pay for it

    limits, discovery = args.elastic.limits(), args.elastic.discovery()
    worker_timeout_s = driver.WORKER_TIMEOUT_S if args.worker_timeout is None else args.worker_timeout
    _say_remarks(args)
    if args.verbose:
        _say(f"{args.num_proc} x {shlex.join(args.command)}, elastic")
    return _outcome_of(lambda: driver.drive(
        _job(args, timeout_s), limits, discovery, 1, 2, SIGNALS, worker_timeout_s,
        lambda name: network.is_here(name, resolve=not args.launch_command)))


def _say_remarks(args: argparse.Namespace) -> None:
    for line in filter(None, [*args.remarks.values(), nesting.remark(os.environ)]):
        _say(line)


def _outcome_of(run: Callable[[], Outcome]) -> int:
    try:
        outcome = run()
    except StartError as error:
        return _say(str(error), error.exit_code)
    except OSError as error:
        return _say(f"cannot write the output: {error}", 1)
    except DiscoveryError as error:
        return _say(str(error), 1)
    for line in outcome.text.splitlines():
        _say(line)
    return outcome.exit_code


def _agent_command(args: argparse.Namespace, host: str, timeout_s: float) -> list[str]:
    if args.launch_command:
        return remote.template_command(args.launch_command, host)
    return remote.ssh_command(host, timeout_s, args.ssh_port, args.ssh_identity_file)


def _open_standard_descriptors() -> None:
    """If we were started with closed ones (>&-), pipes of ranks would get the numbers 0 to 2."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)


def _say(text: str, code: int = 0) -> int:
    try:
        os.write(2, f"lightccrun: {printable(text)}\n".encode())
    except OSError:  # nobody reads it; the exit code says it too
        return code or exit_code(-signal.SIGPIPE)
    return code
