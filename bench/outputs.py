"""What a new output costs beside one in place: operations whose outputs the program drops and asks for again.

    python bench/outputs.py [--np 2] [--frameworks torch,numpy,tensorflow] [--mib 16,64]

`y = verb(x)` in a loop, and right after it `allreduce_` of a tensor as large as the output, by turns in the same
processes, each time as long as on the slowest rank; the medians, and their ratio. The floor is what this machine's
memory asks for the third stream: the same ratio of two plain loops that all ranks run at once, one of which writes
where it has read and one elsewhere. Then the same once more with
LIGHTCC_OUTPUT_POOL_BYTES=0, where every output lies in new memory. TensorFlow has nothing in place: lightcc.numpy's
allreduce_ stands beside it. Results are checked; a goal that is missed is printed as such.
"""
import argparse
import importlib
import importlib.util
import os
import statistics
import time
from typing import Any, Callable, Dict, List

import numpy
from where import heading, leave_checkout, surroundings, table_row, version

import lightcc
import lightcc.numpy

GOAL = 1.3
GOAL_OF_FLOOR = 1.15  # times the floor, where that alone is beyond the goal
VERBS = ("allreduce", "allgather", "alltoall")
POOLS = {"kept": "", "new": "0"}  # what is done with outputs' memory: LIGHTCC_OUTPUT_POOL_BYTES, "" for its default
WARM_UP = 4


class Framework:
    """How arrays are made and sent. Verbs get as much input as gives an output of so many floats."""

    def __init__(self, name: str):
        self.hvd = importlib.import_module(f"lightcc.{name}")
        self.name = name

    def ones(self, count: int) -> Any:
        if self.name == "numpy":
            return numpy.ones(count, "float32")
        if self.name == "torch":
            import torch
            return torch.ones(count)
        import tensorflow as tf
        return tf.ones([count])

    def new(self, verb: str, count: int) -> Callable[[], Any]:
        x = self.ones(count // self.hvd.size() if verb == "allgather" else count)
        more: Dict[str, Any] = {"op": self.hvd.Max} if verb == "allreduce" else {}
        return lambda: getattr(self.hvd, verb)(x, **more)

    def in_place(self, count: int) -> Callable[[], Any]:
        hvd = lightcc.numpy if self.name == "tensorflow" else self.hvd
        x = numpy.ones(count, "float32") if self.name == "tensorflow" else self.ones(count)
        return lambda: hvd.allreduce_(x, op=hvd.Max)


def measure_floor(mib: List[int], repeats: int) -> Dict[str, List[float]]:
    """Seconds on this rank by "floor MiB", elsewhere and in place."""
    samples: Dict[str, List[float]] = {}
    for size in mib:
        x, y = numpy.ones(size << 18, "float32"), numpy.zeros(size << 18, "float32")
        for repeat in range(-WARM_UP, repeats):
            for key, to in ((f"floor {size}", y), (f"floor {size} in place", x)):
                lightcc.numpy.barrier()
                begin = time.perf_counter()
                numpy.maximum(x, x, out=to)
                if repeat >= 0:
                    samples.setdefault(key, []).append(time.perf_counter() - begin)
    return samples


def measure(frameworks: List[str], mib: List[int], repeats: int) -> Dict[str, List[float]]:
    """Seconds on this rank by "pool framework verb MiB", and what is in place right after each of them."""
    samples: Dict[str, List[float]] = {}
    for pool, most_bytes in POOLS.items():
        os.environ.pop("LIGHTCC_OUTPUT_POOL_BYTES", None)
        if most_bytes:
            os.environ["LIGHTCC_OUTPUT_POOL_BYTES"] = most_bytes
        lightcc.numpy.init()
        if pool == "kept":
            samples.update(measure_floor(mib, repeats))
        for framework in map(Framework, frameworks):
            for size in mib:
                for verb in VERBS:
                    count = size << 18
                    new, in_place = framework.new(verb, count), framework.in_place(count)
                    key = f"{pool} {framework.name} {verb} {size}"
                    y = None
                    for repeat in range(-WARM_UP, repeats):
                        for what in (key, f"{key} in place"):
                            lightcc.numpy.barrier()
                            begin = time.perf_counter()
                            if what == key:
                                y = new()
                            else:
                                in_place()
                            if repeat >= 0:
                                samples.setdefault(what, []).append(time.perf_counter() - begin)
                    if numpy.asarray(y).shape != (count,) or float(numpy.asarray(y).sum()) != count:
                        raise AssertionError(f"{key}: a wrong result")
        lightcc.numpy.shutdown()
    return samples


def rows(samples: Dict[str, List[float]]) -> List[List[str]]:
    def ms(key: str) -> float:
        return statistics.median(samples[key]) * 1e3

    found = []
    for key in samples:
        pool, *case = key.split()
        if pool != "kept" or case[-1] == "place":
            continue
        kept, in_place, new = ms(key), ms(f"{key} in place"), ms(" ".join(["new", *case]))
        floor = ms(f"floor {case[-1]}") / ms(f"floor {case[-1]} in place")
        verdict = "ok" if kept <= max(GOAL, GOAL_OF_FLOOR * floor) * in_place else "MISSED"
        found.append([*case, f"{kept:.1f}", f"{in_place:.1f}", f"{kept / in_place:.2f}", f"{floor:.2f}", verdict,
                      f"{new:.1f}"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in ("torch", "numpy", "tensorflow") if importlib.util.find_spec(name)]
    parser.add_argument("--np", type=int, default=2, help="ranks; default %(default)s")
    parser.add_argument("--frameworks", type=lambda text: text.split(","), default=here, help="default: what is here")
    parser.add_argument("--mib", type=lambda text: [int(size) for size in text.split(",")], default=[16, 64],
                        help="sizes of the output; default 16,64")
    parser.add_argument("--repeats", type=int, default=15, help="default %(default)s")
    args = parser.parse_args()
    leave_checkout()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(heading(surroundings(args.np, [f"lightcc {lightcc.__version__}"] + [
        f"{name} {version(name, f'{name}-cpu')}" for name in args.frameworks])), flush=True)
    ranks = lightcc.run(measure, (args.frameworks, args.mib, args.repeats), num_proc=args.np)
    slowest = {key: [max(values) for values in zip(*(rank[key] for rank in ranks))] for key in ranks[0]}
    print(table_row("", "", "MiB", "new output, ms", "in place, ms", "ratio", "floor",
                    f"goal {GOAL}, or {GOAL_OF_FLOOR} of the floor", "without the pool, ms"))
    print(table_row(*["---"] * 9))
    for row in rows(slowest):
        print(table_row(*row))
    print(f"Median of {args.repeats} repeats, slowest rank; results were checked.")


if __name__ == "__main__":
    main()
