"""Records when the gradients of a network become ready, for bench/replay.py.

    python bench/record_trace.py bench/resnet50_trace.json     # half a minute on quiet cores
    python bench/record_trace.py --model vgg16 bench/vgg16_trace.json            # two minutes
    python bench/record_trace.py --model bert_base bench/bert_base_trace.json    # a minute

The network (networks.py) trains on random inputs on this CPU, without communication. A hook at each parameter tells
when its gradient is there. The trace has the medians over steps as shares of a step, from the begin of forward to the
last gradient: for each parameter when it is ready, and when forward ends.
"""
import argparse
import json
import statistics
import time
from pathlib import Path
from typing import List, Tuple

import torch
from networks import NETWORKS, Network
from shapes import MODELS, Shape
from where import heading, surroundings


def record(network: Network, shapes: List[Shape], examples: int, steps: int, threads: int
           ) -> Tuple[float, List[float], List[float]]:
    """When forward ends and each gradient is ready, as shares of a step; and the seconds of each step."""
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    model, batch, labels = network.make(), network.batch(examples), torch.arange(examples)
    parameters = list(model.parameters())
    assert [tuple(p.shape) for p in parameters] == shapes, f"not the parameters of {network.title}"
    ready = [0.0] * len(parameters)

    def note(index: int):
        def hook(_: torch.Tensor) -> None:
            ready[index] = time.perf_counter()
        return hook

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(note(index))
    forwards, shares, took = [], [], []
    for step in range(steps + 1):
        model.zero_grad()
        begin = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(batch), labels)
        forward = time.perf_counter() - begin
        loss.backward()
        if step:  # the first one warms up
            took.append(max(ready) - begin)
            forwards.append(forward / took[-1])
            shares.append([(moment - begin) / took[-1] for moment in ready])
    return statistics.median(forwards), [statistics.median(some) for some in zip(*shares)], took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="gets the trace")
    parser.add_argument("--model", choices=NETWORKS, default="resnet50", help="default %(default)s")
    parser.add_argument("--examples", type=int, default=8, help="a step; default %(default)s")
    parser.add_argument("--steps", type=int, default=7, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default %(default)s")
    args = parser.parse_args()
    where = heading(surroundings(1, [f"torch {torch.__version__}"]))
    network = NETWORKS[args.model]
    forward, ready, took = record(network, MODELS[args.model](), args.examples, args.steps, args.threads)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(json.dumps({
        "what": f"{network.title}, {args.examples} {network.inputs} a step, {args.threads} threads, medians of "
                f"{args.steps} steps; shares of a step from the begin of forward to the last gradient",
        "where": where, "step_s": round(statistics.median(took), 3), "forward": round(forward, 4),
        "ready": [round(share, 4) for share in ready]}).replace('", "', '",\n "') + "\n")
    print(f"{where}\nsteps of {min(took):.2f} to {max(took):.2f} s, forward {forward:.2f} of a step: {args.file}")


if __name__ == "__main__":
    main()
