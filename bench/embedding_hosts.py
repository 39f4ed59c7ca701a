"""Two hosts of two ranks, and of one, each host on a cable of 1 Gbit/s: steps beside the bound of their bytes, and with
prefetch.

Hosts are network namespaces (cables.py), which share this machine's cores, where four ranks need four. What must cross
a host's cable in a step, one way, are the keys that its ranks ask the other host for, the rows that the other host's
ranks ask it for, and the gradients of its ranks for the other host's rows; divided by the goodput of plain streams this
is the bound. The dense part of a step is imitated: all ranks sleep, as if a GPU computed.
"""
import contextlib
import secrets
import statistics
import tempfile
import time
from typing import Any, Dict, List, Sequence, Tuple

import cables
import embedding_ids
import numpy as np
import torch
from cables import emulated, goodput_of, goodput_text, network_of
from embedding_exchange import ms
from report import ratio_of
from teams import Team, become_rank

import lightcc.torch as hvd
from lightcc.embedding import lib
from lightcc.torch import embedding as E

PLACES, RATE, IDS, BATCHES, WARM_UP = ((2, 2), (1, 1)), "1gbit", 65536, 4, 2
DENSE_S = 0.010
MOST_OF_BOUND, MOST_WITH_PREFETCH = 1.15, 0.9
LARGE_MESSAGES = cables.LEAST_BYTES_FOR_CABLE  # the cable's burst is then as for long messages
CASES = {"16 float32": (16, None), "64 float32": (64, None), "16 float16 on the wire": (16, torch.float16)}


class Rank:
    """Looks up uniform ids of its own."""

    def __init__(self, rank: int, size: int, hosts: Sequence[int], places: Sequence[cables.Place], folder: str,
                 secret: str, rows: int):
        self._hosts = np.repeat(np.arange(len(hosts)), hosts)
        become_rank(rank, size, folder)
        cables.settle(places[rank], secret)
        torch.set_num_threads(1)
        hvd.init()
        self._rank, self._rows = rank, rows
        self._batches = [torch.from_numpy(embedding_ids.raw_keys(one))
                         for one in embedding_ids.batches("uniform", rows, IDS, BATCHES, rank + 2)]

    def prepare(self, case: str) -> Tuple[int, int, int]:
        """A table whose rows all exist. This rank's part of a step: bytes of keys, and of rows, and of gradients for
        or from the other host."""
        dim, wire = CASES[case]
        self._module = E.HashEmbedding(dim, name=case, wire=wire)
        self._sparse = E.Adagrad(E.tables(self._module), lr=1e-3)
        every = embedding_ids.raw_keys(np.arange(self._rank, self._rows, hvd.size()))
        for piece in np.array_split(every, -(-len(every) // IDS)):
            self._module(torch.from_numpy(piece)).backward(torch.zeros(len(piece), dim))
            self._sparse.step()
        self._gradient = torch.full((IDS, dim), 1e-3)
        counts = []
        for batch in self._batches:
            keys = np.unique(batch.numpy())
            owners = np.empty(len(keys), np.uint16)
            lib.call("owner_of", self._module.table.handle, lib.address(keys), len(keys), lib.address(owners))
            counts.append(int((self._hosts[owners] != self._hosts[self._rank]).sum()))
        count = int(np.mean(counts))
        return 8 * count, (2 if wire else 4) * dim * count, 4 * dim * count  # gradients travel as they are

    def drop(self) -> None:
        self._module.table.close()

    def steps(self, repeats: int, dense_s: float, ahead: bool) -> float:
        """Seconds a step."""
        for i in range(WARM_UP):
            self._step(i, dense_s, ahead and i + 1 < WARM_UP)
        hvd.barrier()
        begin = time.perf_counter()
        for i in range(repeats):
            self._step(i, dense_s, ahead and i + 1 < repeats)
        return (time.perf_counter() - begin) / repeats

    def _step(self, i: int, dense_s: float, ahead: bool) -> None:
        output = self._module(self._batches[i % BATCHES])
        if ahead:
            E.prefetch([(self._module, self._batches[(i + 1) % BATCHES])])
        if dense_s:
            time.sleep(dense_s)
        output.backward(self._gradient)
        self._sparse.step()

    def stream(self, *arguments: Any) -> Any:
        return cables.stream(self._rank, *arguments)

    def end(self) -> None:
        hvd.shutdown()


def bytes_of_cable(hosts: Sequence[int], parts: List[Tuple[int, int, int]]) -> int:
    """The most that a host sends in a step, of what prepare() says of all ranks."""
    per_host = np.add.reduceat(np.array(parts), np.cumsum((0, *hosts[:-1])), axis=0)
    keys, rows, gradients = per_host.T
    return int((keys + rows[::-1] + gradients).max())  # rows are sent by the host that is asked


def contest(rows: int, rounds: int, repeats: int = 8) -> Dict[str, Any]:
    if emulated.why_not():
        print(f"LEFT OUT: hosts: {emulated.why_not()}", flush=True)
        return {}
    return {" + ".join(map(str, hosts)): on_hosts(hosts, rows, rounds, repeats) for hosts in PLACES}


def on_hosts(hosts: Sequence[int], rows: int, rounds: int, repeats: int) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(hosts, False, RATE, LARGE_MESSAGES))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        team = Team("hosts", sum(hosts), Rank, (hosts, network.places(), folder, secrets.token_hex(16), rows))
        stack.callback(team.end)
        before = goodput_of(team, network)
        for case in CASES:
            sent = bytes_of_cable(hosts, team.ask("prepare", case))
            samples: Dict[str, List[float]] = {"step": [], "dense": [], "prefetched": []}
            for _ in range(rounds):
                samples["step"].append(max(team.ask("steps", repeats, 0.0, False)))
                samples["dense"].append(max(team.ask("steps", repeats, DENSE_S, False)))
                samples["prefetched"].append(max(team.ask("steps", repeats, DENSE_S, True)))
            team.ask("drop")
            found[case] = {"bytes": sent, "samples_s": samples}
        goodput = max(before, goodput_of(team, network))
    print(f"\n2 hosts of {hosts[0]}, {RATE}, {IDS:,} uniform ids a rank; {goodput_text(goodput, RATE)}")
    for case, row in found.items():
        print(line(case, row, goodput), flush=True)
    return {"goodput": goodput, "cases": found}


def line(case: str, row: Dict[str, Any], goodput: float) -> str:
    samples, bound = row["samples_s"], row["bytes"] / goodput  # seconds
    row["by_bound"] = statistics.median(samples["step"]) / bound
    row["prefetch"], low, high = ratio_of(samples["prefetched"], samples["dense"])
    by_bound = row["by_bound"]
    goals = [f"{by_bound:.3f} of the bound, goal <= {MOST_OF_BOUND:g}: {verdict(by_bound, MOST_OF_BOUND)}",
             f"with prefetch {row['prefetch']:.3f} ({low:.3f} to {high:.3f}), goal <= {MOST_WITH_PREFETCH:g}: "
             f"{verdict(row['prefetch'], MOST_WITH_PREFETCH)}"]
    return (f"{case}: {row['bytes'] / 1e6:.1f} MB, bound {1e3 * bound:.1f} ms, step {ms(samples['step'])} ms; with "
            f"{1e3 * DENSE_S:.0f} ms of a dense part {ms(samples['dense'])} ms, prefetched {ms(samples['prefetched'])} "
            f"ms\n  " + "\n  ".join(goals))


def verdict(value: float, most: float) -> str:
    return "ok" if value <= most else "MISSED"
