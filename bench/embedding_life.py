"""What rows that come and go cost, and saving them: lightcc.torch.embedding beside itself.

    python bench/embedding_life.py                      # a few minutes, on a quiet machine
    python bench/embedding_life.py --parts evict save

Each part is a process of its own. Its sides take turns, step after step, and ratios are medians of the rounds' ratios.
evict: steps in which half of the ids are new, with evict=Ttl and with all rows kept; of each round the longest step.
memory: resident memory of such a training with Ttl, in the last tenth of its steps beside the second tenth.
save: save_delta of 1 % of the rows beside a save of all, and the most memory that a save has taken.
commit: a step with a commit of TorchState beside one without.
recovery: steps with commits, of which every hundredth begins a checkpoint of Recovery, beside such steps without.
counted: of a table with as many candidates as rows, counted exactly and in a filter: a delta of 1 % of both beside
all of it, bytes of the files and time; of save_delta and save, and of two checkpoints of Recovery.
"""
import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional

import embedding_ids
import numpy as np
import psutil
import torch
from embedding_own import Table
from where import heading, surroundings

import lightcc.torch as hvd
from lightcc.torch import embedding as E

DIM, IDS, TTL = 16, 16384, 20
Seconds = List[float]


class Stream:
    """A table that trains ids of which half were never there before."""

    def __init__(self, name: str, **options):
        self.module = E.HashEmbedding(DIM, name=name, **options)
        self._sparse = E.Adagrad(E.tables(self.module), lr=0.1)
        self._numbers = self._batches()

    def _batches(self) -> Iterator[torch.Tensor]:
        generator = np.random.default_rng(1)
        for step in range(1 << 30):
            new = np.arange(IDS // 2) + step * (IDS // 2)
            old = generator.integers(max(0, new[0] - TTL * IDS), new[-1] + 1, IDS - len(new))
            yield torch.from_numpy(embedding_ids.raw_keys(np.concatenate([new, old])))

    def step(self) -> float:
        ids, gradient = next(self._numbers), torch.full((IDS, DIM), 1e-3)
        begin = time.perf_counter()
        self.module(ids).backward(gradient)
        self._sparse.step()
        return time.perf_counter() - begin


class Committed:
    """A table whose state commits after each step. options: of TorchState."""

    def __init__(self, name: str, rows: int, **options):
        self.table = Table("adagrad", rows, DIM, name)
        self.state = hvd.elastic.TorchState(self.table.module, sparse=self.table.optimizer, steps=0, **options)
        self.state.sync()
        self._batches = [self.table.prepare(one) for one in embedding_ids.batches("zipf", rows, IDS, 8)]

    def step(self) -> float:
        batch, begin = self._batches[self.state.steps % len(self._batches)], time.perf_counter()
        self.table.step(batch)
        self.state.steps += 1
        self.state.commit()
        return time.perf_counter() - begin


def by_turns(rounds: int, steps: int, sides: Dict[str, Callable[[], float]]) -> Dict[str, List[Seconds]]:
    """Of each side its steps of each round; step after step takes turns."""
    found: Dict[str, List[Seconds]] = {side: [[] for _ in range(rounds)] for side in sides}
    for turn in range(rounds):
        for _ in range(steps):
            for side, step in sides.items():
                found[side][turn].append(step())
    return found


def tell(what: str, ratio: float, goal: str, met: bool, detail: str) -> None:
    print(f"| {what} | {ratio:.3f} | {goal} | {'ok' if met else 'MISSED'} | {detail} |", flush=True)


def at_most(most: float, what: str, ratio: float, detail: str) -> None:
    tell(what, ratio, f"at most {most:g}", ratio <= most, detail)


def evict(rounds: int, _: int) -> None:
    going, kept = Stream("going", evict=E.Ttl(TTL)), Stream("kept")
    for _ in range(2 * TTL):
        going.step(), kept.step()
    found = by_turns(rounds, 60, {"going": going.step, "kept": kept.step})
    longest = [max(a) / max(b) for a, b in zip(found["going"], found["kept"])]
    usual = [statistics.median(a) / statistics.median(b) for a, b in zip(found["going"], found["kept"])]
    at_most(1.2, "longest step with Ttl / with all rows kept", statistics.median(longest),
            f"usual step {statistics.median(usual):.3f}; {len(going.module):,} of {len(kept.module):,} rows")


def memory(rounds: int, _: int) -> None:
    stream, process = Stream("flat", evict=E.Ttl(TTL)), psutil.Process()
    resident = []
    for _ in range(200 * rounds):
        stream.step()
        resident.append(process.memory_info().rss)
    tenth = len(resident) // 10
    at_most(1.05, "resident memory, last tenth / second tenth", max(resident[-tenth:]) / max(resident[tenth:2 * tenth]),
            f"{100 * IDS * rounds:,} new ids; {resident[-1] / 1e6:.0f} MB")


def save(rounds: int, rows: int) -> None:
    table, process = Table("adagrad", rows, DIM, "saved"), psutil.Process()
    some = table.prepare(np.arange(rows // 100))
    ratios, peaks = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            before, begin = process.memory_info().rss, time.perf_counter()
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            E.save(folder, table.module)
            full = time.perf_counter() - begin
            peaks.append(_peak_bytes() / before)
            table.step(some)
            begin = time.perf_counter()
            E.save_delta(folder, table.module)
            ratios.append((time.perf_counter() - begin) / full)
    at_most(0.05, "delta of 1 % of the rows / save of all, time", statistics.median(ratios),
            f"{rows:,} rows; the save {full:.2f} s")
    at_most(1.05, "most memory of a save / before", statistics.median(peaks), f"{before / 1e6:.0f} MB before")


def _peak_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def commit(rounds: int, rows: int) -> None:
    plain, kept = Table("adagrad", rows, DIM, "plain"), Committed("committed", rows)
    batches = [plain.prepare(one) for one in embedding_ids.batches("zipf", rows, IDS, 8)]

    def step() -> float:
        begin = time.perf_counter()
        plain.step(batches[kept.state.steps % len(batches)])
        return time.perf_counter() - begin
    found = by_turns(rounds, 50, {"plain": step, "kept": kept.step})
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(found["kept"], found["plain"])]
    tell("step with a commit / without", statistics.median(ratios), "", True, "a commit after each step")


def recovery(rounds: int, rows: int) -> None:
    quiet = Committed("quiet", rows)
    with tempfile.TemporaryDirectory() as folder:
        kept = E.Recovery(folder, every=100)
        writing = Committed("writing", rows, recovery=kept)
        found = by_turns(rounds, 200, {"writing": writing.step, "quiet": quiet.step})
        ratios = [sum(b) / sum(a) for a, b in zip(found["writing"], found["quiet"])]
        kept.finish()
        ratio = statistics.median(ratios)
        tell("steps a second while Recovery writes / without", ratio, "at least 0.9", ratio >= 0.9,
             "a commit after each step on both sides")


def counted(rounds: int, rows: int) -> None:
    _counted("exactly", None, rounds, rows)
    _counted("in a filter", E.Bloom(16 << 20), rounds, rows)


def _counted(how: str, admission: Optional[E.Bloom], rounds: int, rows: int) -> None:
    module = E.HashEmbedding(DIM, name=f"counted {how}", min_count=3, admission=admission)
    sparse = E.Adagrad(E.tables(module), lr=0.1)
    keys = torch.from_numpy(embedding_ids.raw_keys(np.arange(2 * rows)))
    some = torch.cat([keys[:rows // 100], keys[rows:rows + rows // 100]])

    def step(ids: torch.Tensor = some) -> None:
        module(ids).backward(torch.full((len(ids), DIM), 1e-3))
        sparse.step()
    for piece in keys[:rows].split(IDS):
        step(piece.repeat(3))
    for piece in keys[rows:].split(IDS):
        step(piece)
    with tempfile.TemporaryDirectory() as folder:
        _tell_saved(f"save_delta, counted {how}", rounds, folder, step, lambda: E.save(folder, module),
                    lambda: E.save_delta(folder, module))
    with tempfile.TemporaryDirectory() as folder:
        kept = E.Recovery(folder, every=1, full_every=2)
        state = hvd.elastic.TorchState(module, sparse=sparse, recovery=kept)
        state.sync()

        def checkpoint() -> None:
            state.commit()
            kept.finish()
        step(), checkpoint()
        _tell_saved(f"delta of Recovery, counted {how}", rounds, folder, step, checkpoint, checkpoint)


def _tell_saved(what: str, rounds: int, folder: str, step: Callable[[], None], full: Callable[[], object],
                delta: Callable[[], object]) -> None:
    """Files that a delta writes beside those of the full save before it, and its time."""
    times, sizes = [], []
    for _ in range(rounds):
        took, grown = [], []
        for write in (full, delta):
            step()
            before = _bytes_in(folder)
            begin = time.perf_counter()
            write()
            took.append(time.perf_counter() - begin)
            grown.append(sum(size for path, size in _bytes_in(folder).items() if path not in before))
        times.append(took)
        sizes.append(grown)
    whole, changed = (statistics.median(one[i] for one in times) for i in (0, 1))
    at_most(0.05, f"{what}: bytes beside all", sizes[-1][1] / sizes[-1][0], f"{sizes[-1][1] / 1e6:.2f} MB")
    tell(f"{what}: time beside all", changed / whole, "", True, f"{1e3 * changed:.1f} ms")


def _bytes_in(folder: str) -> Dict[str, int]:
    return {str(path): path.stat().st_size for path in Path(folder).rglob("*.safetensors")}


PARTS = {"evict": evict, "memory": memory, "save": save, "commit": commit, "recovery": recovery, "counted": counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=10**6, help="of save, commit and recovery; default %(default)s")
    args = parser.parse_args()
    if len(args.parts) == 1:
        PARTS[args.parts[0]](args.rounds, args.rows)
        return
    print(heading(surroundings(1, [f"torch {torch.__version__}"])))
    print("\n| what | ratio | goal | | |\n| --- | --- | --- | --- | --- |", flush=True)
    for part in args.parts:
        sizes = ["--rounds", str(args.rounds), "--rows", str(args.rows)]
        subprocess.run([sys.executable, __file__, "--parts", part, *sizes], check=True)


if __name__ == "__main__":
    main()
