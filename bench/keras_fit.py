"""What communication costs a step of model.fit: lightcc beside tf.distribute.MultiWorkerMirroredStrategy.

    python bench/keras_fit.py [--np 2] [--models mlp resnet20 tiny resnet50] [--keras legacy 3]

Teams of processes train the same model on the CPU: with lightcc's DistributedOptimizer, under the strategy, and without
communication; and, without communication and with lightcc, once more with computation that XLA has compiled. One works
while the others sleep; a repeat measures each of them, in turning order. First, parameters after some steps must be
equal on all ranks and the same on all sides that communicate. Prints one table, in Markdown. Keras 3 has no strategy
to compare with: its fit fails under it.
"""
import argparse
import contextlib
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import keras_models
import numpy
from keras_trainer import ALONE_XLA, OURS, OURS_XLA, THEIRS, on_rank
from steps import ALONE, counted, measure, medians, summary
from teams import Team
from where import RESULTS, heading, surroundings, table_row, version

import lightcc

GOAL_RATIO = 0.5
CHECKED_STEPS = 5
TOLERANCE = 1e-4   # of parameters, relative and absolute: XLA and the strategy round otherwise
COLUMNS = ("model.fit, ms a step", "Keras", "gradients", "collectives a step", "alone", OURS, THEIRS, "ratio",
           "exposed", f"exposed, {THEIRS}", "ratio, 95 %", ALONE_XLA, OURS_XLA)


def keras_versions() -> Dict[str, str]:
    """Those that are installed, by what --keras calls them. Up to TensorFlow 2.15 there is the legacy one only."""
    keras, legacy = version("keras"), version("tf_keras")
    found = {} if keras is None else {"3" if keras.startswith("3.") else "legacy": f"Keras {keras}"}
    return found if legacy is None else {**found, "legacy": f"tf_keras {legacy}"}


@contextlib.contextmanager
def teams_of(keras: str, np: int, threads: int) -> Iterator[Dict[str, Team]]:
    sides = [ALONE, OURS, ALONE_XLA, OURS_XLA] + [THEIRS] * (keras == "legacy")
    teams: Dict[str, Team] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for side in sides:
                arguments = (side, keras == "legacy", folder, free_ports(np), threads)
                teams[side] = Team(f"{side}, Keras {keras}", np, on_rank, arguments)
            yield teams
        finally:
            for team in teams.values():
                team.end()


def free_ports(count: int) -> List[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]


# One model

def compare(teams: Dict[str, Team], name: str, repeats: int, steps: int) -> Dict[str, Any]:
    """Checks, then measures; the row of this model."""
    gradients = [team.ask("load", name) for team in teams.values()][0][0]
    check(teams, name)
    for team in teams.values():
        team.ask("train", steps)  # warms up
    before = teams[OURS].ask("counters")[0]
    samples = measure(teams, repeats, steps)
    after = teams[OURS].ask("counters")[0]
    row = {"model": name, "gradients": gradients, "step_ms": medians(samples),
           "counters_of_rank_0_a_step": counted(before, after, repeats * (steps + 1)),
           "samples_ms": {side: [1e3 * x for x in xs] for side, xs in samples.items()}}
    return {**row, **summary(samples, OURS, THEIRS)} if THEIRS in teams else row


def check(teams: Dict[str, Team], name: str) -> None:
    """AssertionError unless some steps leave equal parameters on all ranks and about the same on all sides."""
    start = values(teams[OURS].ask("parameters"))
    trained = {}
    for side in (OURS, OURS_XLA, THEIRS):
        if side in teams:
            teams[side].ask("train", CHECKED_STEPS)
            answers = teams[side].ask("parameters")
            assert len({digest for digest, _ in answers}) == 1, f"{name}: {side}'s ranks differ in their parameters"
            trained[side] = values(answers)
    for side, parameters in trained.items():
        numpy.testing.assert_allclose(trained[OURS], parameters, TOLERANCE, TOLERANCE,
                                      err_msg=f"{name}: {side} has other parameters than {OURS}")
    assert not numpy.array_equal(start, trained[OURS]), f"{name}: nothing was learned"


def values(answers: List[Any]) -> numpy.ndarray:
    return numpy.frombuffer(answers[0][1], "float32")


# What is printed

def line(row: Dict[str, Any], keras: str) -> str:
    def ms(side: str) -> str:
        return f"{step[side]:.1f}" if side in step else "–"

    step = row["step_ms"]
    ratio = exposed = interval = "–"
    if THEIRS in step:
        ratio, exposed = f"{row['step_ratio']:.2f}", f"{row['exposed_ms'][THEIRS]:.1f}"
        share, *ends = ("inf" if x is None else f"{x:.2f}" for x in (row["ratio"], *row["interval"]))
        verdict = "" if row["ratio"] is None or row["ratio"] <= GOAL_RATIO else " MISSED"
        interval = f"{share} ({' to '.join(ends)}){verdict}"
    return table_row(keras_models.MODELS[row["model"]][0], keras, str(row["gradients"]),
                     f"{row['counters_of_rank_0_a_step']['collectives']:.1f}", ms(ALONE), ms(OURS), ms(THEIRS), ratio,
                     f"{step[OURS] - step[ALONE]:.1f}", exposed, interval, ms(ALONE_XLA), ms(OURS_XLA))


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = keras_versions()
    parser.add_argument("--np", type=int, default=2, help="ranks, 2 or more; default %(default)s")
    parser.add_argument("--models", nargs="*", choices=list(keras_models.MODELS), default=list(keras_models.MODELS),
                        help="default: all of them")
    parser.add_argument("--keras", nargs="*", choices=list(known), default=sorted(known, reverse=True),
                        help="legacy: what stands in tf_keras or came before Keras 3; default: all that are installed")
    parser.add_argument("--repeats", type=int, default=21, help="measurements of each side; default %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="steps a measurement; default %(default)s")
    parser.add_argument("--threads", type=int, metavar="N",
                        help="TensorFlow's, of a rank; default: the cores divided by the ranks")
    parser.add_argument("--output", type=Path, default=RESULTS / "keras_fit.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    args = parser.parse_args(arguments)
    if args.np < 2:
        parser.error("--np: one rank alone has nobody to send to")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # all sides on the CPU
    where = surroundings(args.np, [f"lightcc {lightcc.__version__}",
                                   f"TensorFlow {version('tensorflow', 'tensorflow-cpu')}",
                                   *(known[keras] for keras in args.keras)])
    threads = args.threads or max(1, where["cores"] // args.np)
    print(heading(where), flush=True)
    print(table_row(*COLUMNS), table_row(*["---"] * len(COLUMNS)), sep="\n", flush=True)
    rows = []
    for keras in args.keras:
        with teams_of(keras, args.np, threads) as teams:
            for name in args.models:
                rows.append({"keras": known[keras], **compare(teams, name, args.repeats, args.steps)})
                print(line(rows[-1], keras), flush=True)
    print(f"\nMedian of {args.repeats} repeats of {args.steps} steps, slowest rank; a rank has {threads} thread(s) of "
          f"TensorFlow's; results were checked.\nExposed: beyond the step alone; goal: <= {GOAL_RATIO:g} x {THEIRS}'s, "
          "which is tf.distribute.MultiWorkerMirroredStrategy.")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**where, "threads": threads, "rows": rows}, indent=1, ensure_ascii=False))
    print(f"All samples: {args.output}")


if __name__ == "__main__":
    main()
