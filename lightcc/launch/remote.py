"""The launcher's side of an agent: starts it by ssh or another command, sends it what to run, and turns its messages
into events like those of ranks on this host (host_ranks.py). Also: which of our environment variables go with a job.
"""

import contextlib
import fcntl
import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Optional, Union

from lightcc._version import __version__
from lightcc.launch import groups
from lightcc.launch.host_ranks import READ_BYTES
from lightcc.launch.hosts import Place
from lightcc.launch.local import OF_A_JOB, StartError, pythonpath_setting
from lightcc.launch.messages import (
    Begin,
    End,
    Ended,
    Failed,
    HoldPort,
    Input,
    Load,
    Message,
    NotStarted,
    Output,
    Over,
    Pause,
    PortHeld,
    Remark,
    ResultPart,
    Said,
    Signal,
    Started,
    StartRank,
    Tell,
    Unpacker,
    find_greeting,
    pack,
)
from lightcc.launch.output import Sink
from lightcc.launch.pipes import piped
from lightcc.launch.result_transfer import PART_BYTES, ResultReceiver
from lightcc.launch.termination import signal_name

SSH_ALIVE_S, SSH_ALIVE_TIMES = 2, 3  # ssh gives a silent host up after 6 to 8 seconds
SILENCE_S = 30.0                     # for commands that never do: an agent speaks every 2 seconds
DOUBTFUL_SILENCE_S = 4.0             # as long as a host may be silent to the ranks of others
END_S = groups.LEFTOVER_GRACE_S + groups.KILL_WAIT_S + 4  # while it ends its ranks, it says nothing
KEPT_BYTES = 2000                    # of what an agent or its ssh prints beside messages
_F_SETPIPE_SZ = 1031                 # fcntl(2); Python 3.9 has no name for it
_EXIT_S = 2.0                        # from the end of its output to the end of ssh

# What belongs to a machine, an account or a login session; all else goes to the ranks of other hosts. A name that
# ends in * stands for all that begin so.
NOT_FORWARDED = (
    "HOSTNAME", "HOST", "HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "MAIL", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_",
    "TERM", "TERM_*", "COLORTERM", "LINES", "COLUMNS", "LS_COLORS", "WINDOWID", "DISPLAY", "WAYLAND_DISPLAY",
    "XAUTHORITY", "DBUS_*", "XDG_*", "SSH_*", "GPG_*", "KRB5CCNAME", "STY", "TMUX*", "INVOCATION_ID", "JOURNAL_STREAM",
)

_OF_A_RANK = (Started, NotStarted, Output, Said, ResultPart, Ended)


class Lost(NamedTuple):
    """The connection to a host is lost. Its agent ends the ranks as soon as it notices."""

    host: str
    text: str


Event = Union[Message, Lost]


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    names = {*OF_A_JOB, *(name for name in NOT_FORWARDED if not name.endswith("*"))}
    beginnings = tuple(name[:-1] for name in NOT_FORWARDED if name.endswith("*"))
    return {k: v for k, v in environment.items() if k not in names and not k.startswith(beginnings)}


def agent_line() -> str:
    """Starts an agent from a shell: plain words, read alike by sh, csh and fish. There is no secret in it."""
    path = [f"{name}={value}" for name, value in pythonpath_setting().items()]
    return shlex.join([*(["env", *path] if path else []), sys.executable, "-m", "lightcc.launch.agent"])


def ssh_command(host: str, timeout_s: float, port: Optional[int] = None, identity: Optional[str] = None) -> list[str]:
    """accept-new: the key of a host that is seen for the first time is believed, and from then on it must stay so.
    ssh gives up before we do, so that its own error text is there, even where it begins late."""
    options = ["BatchMode=yes", "StrictHostKeyChecking=accept-new", f"ConnectTimeout={max(1, int(0.8 * timeout_s))}",
               f"ServerAliveInterval={SSH_ALIVE_S}", f"ServerAliveCountMax={SSH_ALIVE_TIMES}"]
    words = ["ssh", "-T", *(word for option in options for word in ("-o", option))]
    if port is not None:
        words += ["-p", str(port)]
    if identity is not None:
        words += ["-i", identity]
    return [*words, host, agent_line()]


def checked_template(text: str) -> str:
    """Raises ValueError if it is none."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"'{text}': {error}") from None
    if not any("{command}" in word for word in words):
        raise ValueError(f"'{text}' does not say where {{command}} goes")
    return text


def template_command(template: str, host: str) -> list[str]:
    """The template's words, read as by a shell; {host} and {command} are replaced within them, so that the command
    stays one word: a line for sh -c."""
    return [word.replace("{host}", host).replace("{command}", agent_line()) for word in shlex.split(template)]


class Agent:
    """The ranks of another host, those of `places`, by way of the agent there; has the methods of HostRanks."""

    def __init__(self, host: str, places: Sequence[Place], command: Sequence[str],
                 selector: selectors.BaseSelector, receiver: Optional[ResultReceiver] = None) -> None:
        """receiver: of the results of run()."""
        self.host = host
        self.command = command
        self.ranks = [place.rank for place in places]
        self.ready = False  # its greeting has come
        self.over = False   # nothing more will come
        self.holds_port = False                 # it was asked to
        self.master_port: Optional[int] = None  # which it holds; 0: none was free
        self._places = places
        self._result_receiver = receiver
        self._load: Optional[Iterator[bytes]] = None
        self._program = os.path.basename(command[0])
        try:
            self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            raise StartError(f"host {host}: cannot start '{command[0]}': {error.strerror}", 127) from error
        self._pipes = [piped(pipe) for pipe in (self._process.stdin, self._process.stdout, self._process.stderr)]
        self._stdin, self._stdout, self._stderr = self._pipes
        for pipe in (self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        for pipe in (self._stdin, self._stdout) if receiver else ():  # what is large takes few steps
            with contextlib.suppress(OSError):  # the user's pipes hold all the memory they may; then it is slower
                fcntl.fcntl(pipe, _F_SETPIPE_SZ, PART_BYTES)
        self.commands = Sink(self._stdin.fileno(), f"the connection to host {host}")
        self._selector = selector
        self._unpacker = Unpacker()
        self._other_output = b""  # the last of what came beside messages
        self._received_at = time.monotonic()
        self._ending = False
        self._untaken, self._taken = 0, self._received_at  # commands that wait, and since when there are so many
        self._paused = False
        selector.register(self._stdout, selectors.EVENT_READ, self._read)
        selector.register(self._stderr, selectors.EVENT_READ, self._read_errors)

    def load(self, function: Iterable[bytes]) -> None:
        """Begins to send a function of run(), once the agent has answered."""
        self._load = iter(function)

    @property
    def loading(self) -> bool:
        return not self.over and (self._load is not None or self.commands.pending_bytes > 0)

    def can_load(self) -> bool:
        """The next part need not wait for the connection."""
        return self.ready and not self.over and self._load is not None and self.commands.pending_bytes <= PART_BYTES

    def load_more(self) -> None:
        chunk = None if self._load is None else next(self._load, None)
        if chunk is None:
            self._load = None
        else:
            self._send_message(Load(chunk))

    def hold_port(self, ports: str) -> None:
        """To be called when it is ready, before begin(): master_port is known some time after that."""
        self.holds_port = True
        self._send_message(HoldPort(ports))

    def begin(self, command: Sequence[str], environment: Mapping[str, str], talk_variable: str = "",
              slots: int = 0) -> None:
        self._send_message(Begin(self.host, [list(place) for place in self._places], list(command), dict(environment),
                                 os.getcwd(), talk_variable, slots))

    def start_rank(self, place: Place) -> None:
        """One more, after begin()."""
        self.ranks.append(place.rank)
        self._send_message(StartRank(list(place)))

    def tell(self, rank: int, chunk: bytes) -> None:
        self._send_message(Tell(rank, chunk))

    def send(self, rank: int, signum: int) -> None:
        self._send_message(Signal(rank, signum))

    def give(self, chunk: bytes) -> None:
        self._send_message(Input(chunk))

    def pause(self, on: bool) -> None:
        if on != self._paused:
            self._paused = on
            self._send_message(Pause(on))

    def end(self) -> tuple[Event, ...]:
        self._received_at, self._ending = time.monotonic(), True
        self._send_message(End())
        return ()

    def check(self, now: float, doubtful: bool = False) -> list[Event]:
        """Is to be called often. doubtful: there are other signs that the host is lost."""
        if not self.ready or self.over:
            return []
        if self.commands.pending_bytes != self._untaken:
            self._untaken, self._taken = self.commands.pending_bytes, now
        if self._untaken and now - self._taken > SILENCE_S:
            self._kill()
            return self._lose(f"it has taken nothing of what it was sent for {SILENCE_S:.0f} s")
        limit_s = END_S if self._ending else DOUBTFUL_SILENCE_S if doubtful else SILENCE_S
        if now - self._received_at <= limit_s:
            return []
        events = self._read()  # if it was this launcher that stood still, there is something
        if self.over or now - self._received_at <= limit_s:
            return events
        self._kill()
        return self._lose(f"it has been silent for {limit_s:.0f} s")

    def last_lines(self) -> str:
        """The last lines that the agent or its ssh printed beside messages."""
        lines = [line.strip() for line in self._other_output.decode(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-4:])

    def _send_message(self, message: Message) -> None:
        if not self.over:
            self.commands.put(None, pack(message))

    def _read(self) -> list[Event]:
        try:
            chunk = os.read(self._stdout.fileno(), PART_BYTES if self._result_receiver else READ_BYTES)
        except BlockingIOError:
            return []
        self._received_at = time.monotonic()
        if not chunk:
            return self._ended()
        try:
            return self._parsed(chunk)
        except ValueError as error:
            self._kill()
            return self._lose(f"its agent does not make sense: {error}")

    def _parsed(self, chunk: bytes) -> list[Event]:
        if not self.ready:
            self._other_output += chunk
            found = find_greeting(self._other_output)
            if not found:
                self._other_output = self._other_output[-KEPT_BYTES:]
                return []
            version, begin = found
            if version != __version__:
                raise ValueError(f"it is of lightcc {version}, and this launcher of {__version__}")
            chunk, self._other_output, self.ready = self._other_output[begin:], b"", True
        events: list[Event] = []
        for message in self._unpacker.feed(chunk):
            if isinstance(message, _OF_A_RANK) and message.rank not in self.ranks:
                raise ValueError(f"it speaks of rank {message.rank}, which is not on this host")
            if isinstance(message, Output) and message.stream not in (1, 2):
                raise ValueError(f"it sends stream {message.stream} of rank {message.rank}, which there is not")
            if isinstance(message, ResultPart):
                if self._result_receiver is None:
                    raise ValueError("it sends results that nobody asked for")
                self._result_receiver.put(message)
                continue
            if isinstance(message, PortHeld):
                self.master_port = message.port
                continue
            if isinstance(message, Remark):
                message = Remark(f"host {self.host}: {message.text}")
            elif isinstance(message, Failed):
                message = Failed(f"host {self.host}: {message.text}", message.exit_code)
            elif isinstance(message, Over):
                self._unregister()
            events.append(message)
        return events

    def _read_errors(self) -> list[Event]:
        text = b""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._stderr.fileno(), READ_BYTES)
            if not text and self._stderr in self._selector.get_map():
                self._selector.unregister(self._stderr)
        self._other_output = (self._other_output + text)[-KEPT_BYTES:]
        return []

    def _ended(self) -> list[Event]:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_EXIT_S)
        self._read_errors()
        if code is None:
            return self._lose(f"{self._program} closed its output")
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        return self._lose(f"{self._program} {how}")

    def _lose(self, why: str) -> list[Event]:
        self._unregister()
        lines = self.last_lines()
        return [Lost(self.host, why + (f": {lines}" if lines else ""))]

    def _unregister(self) -> None:
        self.over = True
        for pipe in self._pipes:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)

    def disconnect(self) -> None:
        """An agent that still runs ends its ranks when it notices, and then itself."""
        if not self.over:
            self._unregister()
        for pipe in self._pipes:
            pipe.close()

    def wait(self, deadline: float) -> None:
        if not self.ready:  # it has nothing to end
            self._kill()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """ssh, or whatever the launch command has started here."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def agents(places: Sequence[Place], command_for: Callable[[str], Sequence[str]], selector: selectors.BaseSelector,
           receiver: Optional[ResultReceiver] = None) -> Iterator[list[Agent]]:
    """An agent for each host that is not this one. However the block ends, they are gone after it."""
    by_host: dict[str, list[Place]] = {}
    for place in places:
        if not place.here:
            by_host.setdefault(place.host, []).append(place)
    found: list[Agent] = []
    try:
        for host, there in by_host.items():
            found.append(Agent(host, there, command_for(host), selector, receiver))
        yield found
    finally:
        for agent in found:
            agent.disconnect()
        deadline = time.monotonic() + END_S
        for agent in found:
            agent.wait(deadline)
