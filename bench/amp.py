"""What lightcc.amp must show: curves, agreement, cost, killed ranks.

    python bench/amp.py [--rows curves digits agreement cost shapes kills] [--keras PYTHON]

curves: examples/pytorch_amp.py and keras_amp.py, 5 seeds, 1 and 2 ranks: the switching policy's median loss within 10
times that of full precision, where bfloat16 alone is 50 times above, with 35 % of the steps in bfloat16. digits:
accuracy within 0.5 points of full precision. agreement: policies that disagree by design, 2, 3 and 4 ranks. cost: a
step beside one without, on 2 ranks. shapes: how many graphs torch.compile makes, which are as many without lightcc.
kills: 20 kills of a rank during a hold. --keras: a Python with Keras and TensorFlow, if that is another one. Prints a
line a row, and writes build/bench/amp.json; bench/amp_gpu.py is for a GPU.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

from where import RESULTS, heading, surroundings, version

HERE = Path(__file__).resolve().parent
EXAMPLES, TESTS = HERE.parent / "examples", HERE.parent / "tests" / "python"
LARGEST_RATIO, LEAST_RATIO, LEAST_MIXED = 10, 50, 0.35
LARGEST_LOSS_OF_ACCURACY = 0.005
LARGEST_COST, LARGEST_WAIT_US, LARGEST_SWITCH = 1.01, 20, 1.05
KILLS, PERIOD, DEADLINE_S = 20, 8, 3600

Row = Tuple[str, bool, Dict[str, Any]]  # what was found in words, whether the goal was met, and the numbers


def lightccrun(python: str, np: int, *words: Any, flags: Tuple[Any, ...] = ()) -> str:
    command = [python, "-m", "lightcc.runner", "-np", np, *flags, python, *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def found_by(np: int, row: str, option: Any) -> Dict[str, Any]:
    """What amp_worker.py prints."""
    output = lightccrun(sys.executable, np, HERE / "amp_worker.py", row, option)
    return json.loads(output.partition(":found ")[2].splitlines()[0])


def curves(keras: str) -> Iterator[Row]:
    for framework, python in (("pytorch", sys.executable), ("keras", keras)):
        for np in (1, 2):
            folder = RESULTS / f"amp_{framework}_{np}"
            lightccrun(python, np, EXAMPLES / f"{framework}_amp.py", "--seeds", *range(5), "--output", folder)
            yield judged(framework, json.loads((folder / "run.json").read_text()))


def judged(framework: str, found: Dict[str, Any]) -> Row:
    runs = found["runs"]
    loss = {name: statistics.median(run["losses"][-1] for run in its) for name, its in runs.items()}
    mixed = min(run["levels"].count("bfloat16") / len(run["levels"]) for run in runs["switching"])
    ratios = {name: loss[name] / loss["full"] for name in ("bfloat16", "switching")}
    met = ratios["switching"] <= LARGEST_RATIO and ratios["bfloat16"] >= LEAST_RATIO and mixed >= LEAST_MIXED
    text = (f"{framework}, {found['ranks']} rank(s): median loss full {loss['full']:.1e}, bfloat16 "
            f"{loss['bfloat16']:.1e}, switching {loss['switching']:.1e} ({ratios['switching']:.1f} x full), "
            f"{mixed:.0%} of the steps or more in bfloat16")
    return text, met, {"losses": loss, "mixed": mixed}


def digits(_: str) -> Iterator[Row]:
    every = [found_by(2, "digits", seed) for seed in range(3)]
    mean = {name: statistics.mean(found[name] for found in every) for name in every[0]}
    yield (", ".join(f"{name} {value:.2%}" for name, value in mean.items()),
           mean["switching"] >= mean["full"] - LARGEST_LOSS_OF_ACCURACY, mean)


def agreement(_: str) -> Iterator[Row]:
    for np in (2, 3, 4):
        found = found_by(np, "agreement", 2000)
        yield str(found), found["one level"] and found["weights equal"], found


def cost(_: str) -> Iterator[Row]:
    for model in ("resnet20", "tiny"):
        found = found_by(2, "cost", model)
        met = model == "tiny" or (found["Always(float32) / without"] <= LARGEST_COST
                                  and found["wait for the vote us"] <= LARGEST_WAIT_US
                                  and found["switching / mean of both"] <= LARGEST_SWITCH)
        numbers = {name: value for name, value in found.items() if isinstance(value, float)}
        yield (f"{model}: " + ", ".join(f"{name} {value:.3f}" for name, value in numbers.items())
               + "; ms " + ", ".join(f"{side} {ms:.2f}" for side, ms in found["ms"].items()), met, found)


def shapes(_: str) -> Iterator[Row]:
    found = found_by(2, "shapes", 40)
    met = found["graphs"] == found["without lightcc"]
    yield (", ".join(f"{kind} {graphs}" for kind, graphs in found["graphs"].items())
           + f"; as many without lightcc: {met}", met, found)


def kills(_: str) -> Iterator[Row]:
    """In the holds' second steps, one after the other."""
    steps = PERIOD * (KILLS + 2)
    at = [PERIOD * (1 + kill) + 2 for kill in range(KILLS)]
    with tempfile.TemporaryDirectory() as folder:
        output = lightccrun(sys.executable, 2, TESTS / "amp_elastic_job.py", folder, steps, *at,
                            flags=("--min-np", 2, "--failures-per-host", KILLS + 1))
        killed = len(list(Path(folder).iterdir()))
    ends = [json.loads(line.partition(">:end ")[2]) for line in output.splitlines() if ">:end " in line]
    right = len(ends) == 2 and all(end["right"] for end in ends)
    yield f"{killed} kills; all ranks have the levels and the scale of a job without: {right}", (
        right and killed == KILLS), {"killed": killed}


ROWS: Dict[str, Callable[[str], Iterator[Row]]] = {
    "curves": curves, "digits": digits, "agreement": agreement, "cost": cost, "shapes": shapes,
    "kills": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--keras", default=sys.executable)
    options = parser.parse_args()
    where = surroundings(2, [f"torch {version('torch')}"])
    print(heading(where), flush=True)
    rows: List[Dict[str, Any]] = []
    for name in options.rows:
        for text, met, found in ROWS[name](options.keras):
            print(f"{name:<10} {'ok    ' if met else 'MISSED'} {text}", flush=True)
            rows.append({"row": name, "met": met, **found})
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "amp.json").write_text(json.dumps({"where": where, "rows": rows}, indent=1))
    sys.exit(0 if all(row["met"] for row in rows) else 1)


if __name__ == "__main__":
    main()
