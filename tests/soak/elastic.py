"""Elastic jobs whose hosts come and go and whose workers fail, many times beside a busy machine.

    python soak/elastic.py --turns 10 --busy 2              from tests; --only WORD: the scenarios with this word alone

Each scenario says which worlds the job must have, in order, and how it must end. The driver must form these and no
other ("epoch 2: ..."), so their number is that of the rendezvous, and the workers must say the same of them. Prints how
often each scenario passed and how long it took. Exits with 1 if one has failed, with all that this job has printed.
"""
import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PARTS = str(Path(__file__).parents[1] / "python")  # of tests, which this and the workers use
sys.path.append(PARTS)

from jobs import kill, start  # noqa: E402

WORKER = Path(__file__).with_name("elastic_worker.py")
PYTHON_PATH = os.pathsep.join([PARTS, *filter(None, [os.environ.get("PYTHONPATH")])])
KILLED, RAISED = 137, 1
BY = {"raise": "exception", "kill": "kill"}
LIMIT = r"the job was reset {} times, the most by --reset-limit"
COOLDOWN = ("--blacklist-cooldown-range", "3", "6")  # longer than the others need for a world without the host
NOBODY = ("no worker that has the state of the job is left|"  # or, if the driver hears of the exits in another order
          "no host is left whose workers have not failed")


@dataclass(frozen=True)
class Scenario:
    name: str
    np: int
    hosts: str           # those of the first world; with discovery, others come later
    worlds: list         # (workers, hosts) of each, in order
    acts: list           # what to do in each world: (offer, hosts), (kill or raise, workers), (stop,), () for nothing
    code: int = 0
    said: str = ""       # a pattern of what lightccrun says
    discovery: bool = True
    flags: tuple = ()


def failures(slots, how, discovery):
    """Workers of two hosts fail: their hosts are used no more, and those of the others go on."""
    many, last = 2 * slots, str(2 * slots - 1)
    both, rest = (many, "a b"), (slots, "a")
    all_end = {"code": KILLED if how == "kill" else RAISED, "said": NOBODY}
    for name, worlds, acts, end in (
            ("one rank fails", [both, rest], [(how, last), ("stop",)], {}),
            ("rank 0 fails", [both, (slots, "b")], [(how, "0"), ("stop",)], {}),
            ("all ranks fail", [both], [(how, " ".join(map(str, range(many))))], all_end),
            ("all hosts fail, one by one", [both, rest], [(how, last), (how, "0")], all_end)):
        yield Scenario(f"{name}, {named(slots, discovery)}, by {BY[how]}", many, f"a:{slots} b:{slots}", worlds, acts,
                       discovery=discovery, **end)


def named(slots, discovery=True):
    return f"{slots} slot{'s' * (slots > 1)}" + ("" if discovery else ", without discovery")


def changes(slots):
    """Hosts come and go, by discovery."""
    a, b, c = (f"{host}:{slots}" for host in "abc")
    worlds = [(slots, "a"), (2 * slots, "a b"), (slots, "b")]
    acts = [("offer", f"{a} {b}"), ("offer", b), ("offer", f"{b} {c}")]
    yield Scenario(f"hosts added and removed, {named(slots)}", slots, a, worlds, [*acts[:2], ("stop",)])
    yield Scenario(f"a host added, which fails, and another, {named(slots)}", slots, a,
                   [*worlds[:2], (slots, "a"), (2 * slots, "a c")],
                   [acts[0], ("kill", str(slots)), ("offer", f"{a} {b} {c}"), ("stop",)])
    for limit in (1, 2):
        common = {"np": slots, "hosts": a, "worlds": worlds[:limit + 1], "flags": ("--reset-limit", limit)}
        yield Scenario(f"reset limit {limit}, hosts change, {named(slots)}", acts=acts[:limit + 1], code=RAISED,
                       said=LIMIT.format(limit), **common)
        yield Scenario(f"reset limit {limit}, no change more, {named(slots)}", acts=[*acts[:limit], ("stop",)],
                       **common)


def waits(slots, discovery):
    """A failed host that is used again, and slots that do not come."""
    many, both = 2 * slots, (2 * slots, "a b")
    common = {"np": many, "hosts": f"a:{slots} b:{slots}", "discovery": discovery}
    yield Scenario(f"cooldown, {named(slots, discovery)}", worlds=[both, (slots, "a"), both],
                   acts=[("kill", str(slots)), (), ("stop",)], flags=COOLDOWN, **common)
    yield Scenario(f"too few are left, {named(slots, discovery)}", worlds=[both], acts=[("kill", str(slots))],
                   code=KILLED, said=rf"after 2 s \(--elastic-timeout\) there were {slots} of {many} workers",
                   flags=("--min-np", many, "--elastic-timeout", 2), **common)


def limits(how):
    """Failures up to the limit of resets."""
    for limit in (1, 2):
        hosts = "abcd"[:limit + 2]
        yield Scenario(f"reset limit {limit}, hosts fail, by {BY[how]}", len(hosts), " ".join(f"{h}:1" for h in hosts),
                       [(len(hosts) - n, " ".join(hosts[:len(hosts) - n])) for n in range(limit + 1)],
                       [(how, str(len(hosts) - 1 - n)) for n in range(limit + 1)], KILLED if how == "kill" else RAISED,
                       LIMIT.format(limit), False, ("--reset-limit", limit))


def scenarios():
    for slots in (1, 2):
        yield from changes(slots)
        for discovery in (True, False):
            for how in BY:
                yield from failures(slots, how, discovery)
            yield from waits(slots, discovery)
    for how in BY:
        yield from limits(how)


def play(scenario, folder):
    """Runs a job through its worlds. AssertionError, and the whole output, if it is not as the scenario says."""
    listed = folder / "hosts"
    replace(listed, "\n".join(scenario.hosts.split()))
    where = (("--host-discovery-script", f"cat {listed}") if scenario.discovery else
             ("-H", scenario.hosts.replace(" ", ",")))
    job = start("--verbose", "-np", scenario.np, "--min-np", 1, *where, *scenario.flags, "--launch-command",
                "sh -c {command}", sys.executable, WORKER, folder, stderr=subprocess.STDOUT, PYTHONPATH=PYTHON_PATH)
    printed = []
    try:
        for act in scenario.acts:
            while (line := job.process.stdout.readline().decode()) and ">:world " not in line:
                printed.append(line)
            printed.append(line)
            perform(act, folder, listed)
        code, rest, _ = job.finish()
        printed.append(rest)
        expect(scenario, code, "".join(printed))
    except BaseException:
        print("".join(printed), flush=True)
        kill(job.living())
        raise


def perform(act, folder, listed):
    if act[:1] == ("offer",):
        replace(listed, "\n".join(act[1].split()))
    elif act:
        replace(folder / "order", " ".join(act))


def replace(file, text):
    """In one moment, whoever reads it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def expect(scenario, code, text):
    formed = [(int(size), " ".join(hosts.split(", "))) for size, hosts in
              re.findall(r"(?m)^lightccrun: epoch \d+: (\d+) workers? on (.*)$", text)]
    seen = [(int(size), hosts) for size, hosts in re.findall(r"(?m)>:world (\d+) (.*)$", text)]
    assert formed == scenario.worlds, f"the driver formed {formed}, expected {scenario.worlds}"
    assert seen == scenario.worlds, f"workers were in {seen}, expected {scenario.worlds}"
    assert code == scenario.code, f"exit code {code}, expected {scenario.code}"
    assert re.search(scenario.said, text), f"not said: {scenario.said}"


@contextlib.contextmanager
def busy(count):
    """Beside so many processes that compute."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="processes that keep the machine busy")
    parser.add_argument("--only", default="", help="a part of the names of scenarios")
    given = parser.parse_args()
    chosen = [scenario for scenario in scenarios() if given.only in scenario.name]
    times, failed = {scenario.name: [] for scenario in chosen}, 0
    with busy(given.busy):
        for turn in range(given.turns):
            for scenario in chosen:
                before = time.monotonic()
                with tempfile.TemporaryDirectory() as folder:
                    try:
                        play(scenario, Path(folder))
                        times[scenario.name].append(time.monotonic() - before)
                    except AssertionError as error:
                        failed += 1
                        print(f"FAILED in turn {turn + 1}: {scenario.name}: {error}", flush=True)
            print(f"turn {turn + 1}: {failed} failed so far", flush=True)
    print(f"| scenario | worlds | passed of {given.turns} | median | longest |\n| --- | --- | --- | --- | --- |")
    for scenario in chosen:
        took = times[scenario.name]
        worlds = ", ".join(f"{size} on {hosts}" for size, hosts in scenario.worlds)
        print(f"| {scenario.name} | {worlds} | {len(took)} | " +
              (f"{statistics.median(took):.1f} s | {max(took):.1f} s |" if took else "| |"))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
