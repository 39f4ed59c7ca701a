"""One side of bench/embedding.py, in a process and an environment of its own: it waits at its standard input.

    python bench/embedding_side.py SIDE FOLDER ROWS DIM CORE CLOCK

Each line is a list in JSON: "make", rule; "step" or "lookup", rule, kind of ids, repeats. The answer is a line in JSON:
a number, or {"error": text}. A step is what training does with 65,536 ids: look up their rows, one row an id, take one
gradient an id back, and update the rows. Every row of a table exists before anything is timed.
"""
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Dict, List

import embedding_ids as ids

MODULES = {"torch": "embedding_torch", "fbgemm": "embedding_fbgemm", "tfra": "embedding_tfra",
           "lightcc": "embedding_own"}
WARM_UP = 2
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Side:
    """A side's module has Table(rule, rows, dim, batches) with step(batch), lookup(batch), bytes() and prepare(ids),
    which makes of row numbers what step and lookup take."""

    def __init__(self, name: str, folder: Path, rows: int, dim: int, clock: str):
        self._clock = CLOCKS[clock]
        self._module = importlib.import_module(MODULES[name])
        self._rows, self._dim = rows, dim
        self._batches = {kind: ids.read(folder, kind) for kind in ids.KINDS}
        self._tables: Dict[str, Any] = {}
        self._prepared: Dict[Any, List[Any]] = {}

    def make(self, rule: str) -> float:
        """A table, all of whose rows exist; bytes that it takes, 0: unknown."""
        self._tables[rule] = self._module.Table(rule, self._rows, self._dim)
        for kind, some in self._batches.items():
            self._prepared[rule, kind] = [self._tables[rule].prepare(batch) for batch in some]
            self.step(rule, kind, WARM_UP)
            self.lookup(rule, kind, WARM_UP)
        return self._tables[rule].bytes()

    def drop(self, rule: str) -> float:
        del self._tables[rule]
        return 0.0

    def step(self, rule: str, kind: str, repeats: int) -> float:
        return self._timed(self._tables[rule].step, self._prepared[rule, kind], repeats)

    def lookup(self, rule: str, kind: str, repeats: int) -> float:
        return self._timed(self._tables[rule].lookup, self._prepared[rule, kind], repeats)

    def _timed(self, call: Any, some: List[Any], repeats: int) -> float:
        """Seconds a call."""
        begin = self._clock()
        for i in range(repeats):
            call(some[i % len(some)])
        return (self._clock() - begin) / repeats


def main() -> None:
    name, folder, rows, dim, core, clock = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what frameworks print is no answer
    side = None
    try:
        side = Side(name, Path(folder), int(rows), int(dim), clock)
        answer: Any = side._module.VERSION
    except Exception:
        answer = {"error": traceback.format_exc()}
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = getattr(side, what)(*arguments)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
