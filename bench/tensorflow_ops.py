"""What a collective in a TensorFlow graph costs beyond the core's own work: many small tensors in one tf.function.

    python bench/tensorflow_ops.py [--np 2] [--tensors 161]

On one rank and on --np ranks, by turns in the same processes: the tensors through lightcc's operations, one each, as
one group, and each when the last one is there; through the C API, called from Python with requests that are filled in
already; through lightcc.numpy; and through an operation that only negates, which tells what the graph itself costs.
Every way is first checked. Prints one table, in Markdown, µs a tensor: the median of the repeats, each as long as on
the slowest rank.
"""
import argparse
import json
import os
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy
from teams import Team, become_rank
from where import RESULTS, heading, surroundings, table_row, version

import lightcc
import lightcc.numpy as hvd
from lightcc.core import lib
from lightcc.core.request_buffer import RequestBuffer

GOAL_US = 20
FLOATS = 16
GRAPH, C_API = "one each, in a tf.function", "the C API"
NEGATED = "no exchange: a tf.function that negates"
LAYER = "operations of TensorFlow, beyond the C API"


class Ways:
    """A rank; the ways to exchange the rows of a matrix, which is the ranks' sum then."""

    def __init__(self, rank: int, size: int, folder: str, tensors: int):
        become_rank(rank, size, folder)
        import tensorflow as tf

        import lightcc.tensorflow as hvd_tensorflow
        for set_threads in (tf.config.threading.set_intra_op_parallelism_threads,
                            tf.config.threading.set_inter_op_parallelism_threads):
            set_threads(1)
        hvd.init()
        self._tensors = tensors
        self._rows = numpy.full((tensors, FLOATS), rank + 1, "float32")
        self._prepare_c_api()
        rows = tf.constant(self._rows)
        unstacked = tf.unstack(rows)

        @tf.function
        def one_each(rows):
            return tf.stack([hvd_tensorflow.allreduce(row, op=hvd.Sum) for row in tf.unstack(rows, tensors)])

        @tf.function
        def group(rows):
            return tf.stack(hvd_tensorflow.grouped_allreduce(tf.unstack(rows, tensors), op=hvd.Sum))

        @tf.function
        def chain(rows):
            summed = []
            for row in tf.unstack(rows, tensors):
                with tf.control_dependencies(summed[-1:]):
                    summed.append(hvd_tensorflow.allreduce(row, op=hvd.Sum))
            return tf.stack(summed)

        @tf.function
        def negated(rows):
            return tf.stack([-row for row in tf.unstack(rows, tensors)])

        self._ways: Dict[str, Callable[[], Any]] = {
            GRAPH: lambda: one_each(rows), "one group, in a tf.function": lambda: group(rows),
            "each after the last one, in a tf.function": lambda: chain(rows),
            "eager, one after the other": lambda: [hvd_tensorflow.allreduce(row, op=hvd.Sum) for row in unstacked],
            C_API: self._c_api, "lightcc.numpy": self._numpy, NEGATED: lambda: negated(rows)}
        for name, way in self._ways.items():
            expected = -self._rows if name == NEGATED else numpy.full_like(self._rows, size * (size + 1) // 2)
            numpy.testing.assert_array_equal(numpy.asarray(way()), expected, name)

    def measure(self, repeats: int, calls: int) -> Dict[str, List[float]]:
        """Seconds a tensor of each way, for each repeat."""
        samples: Dict[str, List[float]] = {name: [] for name in self._ways}
        for _ in range(repeats):
            for name, way in self._ways.items():
                hvd.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    way()
                samples[name].append((time.perf_counter() - begin) / calls / self._tensors)
        return samples

    def collectives(self, calls: int) -> float:
        """How many collectives a call of the tf.function has been made of."""
        before = lib.counters()["collectives"]
        for _ in range(calls):
            self._ways[GRAPH]()
        return (lib.counters()["collectives"] - before) / calls

    def end(self) -> None:
        hvd.shutdown()

    def _prepare_c_api(self) -> None:
        self._summed = numpy.empty_like(self._rows)
        self._shape = array("q", [FLOATS])
        shape, _ = self._shape.buffer_info()
        self._names = [array("b", f"row{i}\0".encode()) for i in range(self._tensors)]
        self._requests = []
        for name, source, target in zip(self._names, self._rows, self._summed):
            request = RequestBuffer(1)
            request.set_request(lib.ALLREDUCE, 0, 0, name.buffer_info()[0], lib.SUM)
            request.set_tensor(0, source.ctypes.data, target.ctypes.data, shape, lib.FLOAT32, 1)
            self._requests.append(request)

    def _c_api(self) -> numpy.ndarray:
        lib.finish_all(array("q", [lib.submit(request.address) for request in self._requests]))
        return self._summed

    def _numpy(self) -> List[numpy.ndarray]:
        handles = [hvd.allreduce_async(row, op=hvd.Sum) for row in self._rows]
        return [hvd.synchronize(handle) for handle in handles]


def in_world(size: int, tensors: int, repeats: int, calls: int) -> Dict[str, Any]:
    """The samples of a world of so many ranks, in µs of the slowest, with what the operations add to the C API."""
    with tempfile.TemporaryDirectory() as folder:
        team = Team(f"{size} ranks", size, Ways, (folder, tensors))
        try:
            team.ask("measure", 1, calls)  # warms up
            of_ranks = team.ask("measure", repeats, calls)
            collectives = team.ask("collectives", calls)[0]
        finally:
            team.end()
    samples = {name: [1e6 * max(times) for times in zip(*(rank[name] for rank in of_ranks))] for name in of_ranks[0]}
    samples[LAYER] = [graph - c_api for graph, c_api in zip(samples[GRAPH], samples[C_API])]
    return {"ranks": size, "samples_us": samples, "collectives_a_call": collectives}


def table(worlds: List[Dict[str, Any]], tensors: int) -> str:
    titles = [f"{world['ranks']} rank{'s' * (world['ranks'] > 1)}" for world in worlds]
    lines = [table_row(f"allreduce of {tensors} tensors of {FLOATS} floats, µs a tensor", *titles),
             table_row("---", *["---"] * len(worlds))]
    for name in worlds[0]["samples_us"]:
        medians = [statistics.median(world["samples_us"][name]) for world in worlds]
        cells = [f"{us:.1f}{'' if name != LAYER or us <= GOAL_US else ' MISSED'}" for us in medians]
        goal = f" (goal <= {GOAL_US})" if name == LAYER else ""
        lines.append(table_row(name + goal, *cells))
    counts = [f"{world['collectives_a_call']:.1f}" for world in worlds]
    return "\n".join([*lines, table_row(f"collectives for one tf.function of {tensors}", *counts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", type=int, default=2, help="ranks of the second column; default %(default)s")
    parser.add_argument("--tensors", type=int, default=161, help="in one tf.function; default %(default)s")
    parser.add_argument("--repeats", type=int, default=21, help="measurements of each way; default %(default)s")
    parser.add_argument("--calls", type=int, default=20, help="calls a measurement; default %(default)s")
    parser.add_argument("--output", type=Path, default=RESULTS / "tensorflow_ops.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    where = surroundings(args.np, [f"lightcc {lightcc.__version__}",
                                   f"TensorFlow {version('tensorflow', 'tensorflow-cpu')}"])
    print(heading(where), flush=True)
    worlds = [in_world(size, args.tensors, args.repeats, args.calls) for size in sorted({1, args.np})]
    print(table(worlds, args.tensors))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "tensors": args.tensors, "worlds": worlds}, indent=1,
                                      ensure_ascii=False))
    print(f"\nAll samples: {args.output}")


if __name__ == "__main__":
    main()
