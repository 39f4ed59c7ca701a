"""Jobs on two hosts over HARP (LIGHTCC_NET=harp) and over TCP: training while packets are lost, and two jobs that share
a bottleneck.

    python bench/harp_jobs.py                          # as root; about four minutes
    python bench/harp_jobs.py --losses 0.01 --rounds 9
    python bench/harp_jobs.py --losses --queues 1ms 5ms 20ms

Hosts are two network namespaces on a cable (harp_network.py). Training: a multi-layer perceptron with PyTorch,
gradients of 5.3 MB a step; packets of the transport that is measured are lost at random on both hosts, and once the
cable is down for three seconds. All runs must end with the same weights, bit by bit. Sharing: all-reduces of 4 MiB on a
cable of 1 Gbit/s whose queue holds so much (`tc`, tbf); two jobs at a time, of the same and of both transports. Jain's
index of two equal shares is 1. Nets take turns; a ratio is the median of the rounds' ratios.
"""
import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from typing import Dict, Iterator, List, Tuple

from harp_network import Cable
from peers import own
from where import heading, surroundings

NETS = ("harp", "tcp")
PROTOCOL = {"harp": "udp", "tcp": "tcp"}
STORE_PORT, CUT_S, RUN_S = 9900, 3, 300
PAIRS = (("harp", "harp"), ("tcp", "tcp"), ("harp", "tcp"))

TRAIN = """
import hashlib, os, sys, time
import torch
import lightcc.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU(),
                            torch.nn.Linear(1024, 10))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
                                     named_parameters=model.named_parameters())
hvd.barrier()
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
for step in range(int(os.environ["STEPS"])):
    random = torch.Generator().manual_seed(1000 * step + hvd.rank())
    images = torch.randn(32, 256, generator=random)
    labels = torch.randint(10, (32,), generator=random)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
seconds = time.perf_counter() - start
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("result", seconds, hashlib.sha256(weights).hexdigest(), flush=True)
hvd.shutdown()
"""

REDUCE = """
import os, sys, time
import numpy as np
import lightcc.numpy as hvd

hvd.init()
tensor = np.ones(1 << 20, np.float32)
hvd.allreduce(tensor, name="x", op=hvd.Sum)
print("ready", flush=True)
sys.stdin.readline()
start, count, over = time.monotonic(), 0, False
while not over:
    for _ in range(4):
        hvd.allreduce(tensor, name="x", op=hvd.Sum)
    count += 4
    late = time.monotonic() > start + float(os.environ["SECONDS"])
    over = bool(hvd.allreduce(np.array([late], np.int32), name="over", op=hvd.Max)[0])
print("result", count * tensor.nbytes * 8e-9 / (time.monotonic() - start), flush=True)
hvd.shutdown()
"""


class Job:
    """A rank on each end of the cable."""

    def __init__(self, cable: Cable, net: str, program: str, number: int = 0, **variables: str) -> None:
        common = {**os.environ, "LIGHTCC_NET": net, "HOROVOD_SIZE": "2", "LIGHTCC_JOB_ID": str(number),
                  "LIGHTCC_SECRET": "bench", "LIGHTCC_STORE_ADDR": f"{cable.address(0)}:{STORE_PORT + 20 * number}",
                  **variables}
        self.ranks = [cable.popen(rank, [sys.executable, "-c", program], env={**common, "HOROVOD_RANK": str(rank)},
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE) for rank in (0, 1)]

    def wait_ready(self) -> None:
        for rank in self.ranks:
            if rank.stdout.readline() != "ready\n":
                raise RuntimeError(f"a rank did not begin: exit {rank.wait()}")

    def begin(self) -> None:
        for rank in self.ranks:
            rank.stdin.write("\n")
            rank.stdin.flush()

    def result(self) -> List[List[str]]:
        """What each rank says at its end."""
        said = [rank.communicate(timeout=RUN_S)[0] for rank in self.ranks]
        if any(rank.returncode for rank in self.ranks):
            raise RuntimeError(f"ranks ended with {[rank.returncode for rank in self.ranks]}")
        return [text.split()[1:] for text in said]


@contextlib.contextmanager
def trouble(cable: Cable, net: str, loss: float) -> Iterator[None]:
    cable.lose(loss, PROTOCOL[net], STORE_PORT)
    try:
        yield
    finally:
        cable.lose(0)


def train(cable: Cable, net: str, steps: int, loss: float = 0, cut: bool = False) -> Tuple[float, str]:
    """Seconds a step of the slower rank, and what the weights are; they are the same on both."""
    with trouble(cable, net, loss):
        job = Job(cable, net, TRAIN, STEPS=str(steps))
        job.wait_ready()
        job.begin()
        if cut:
            cable.run(1, ["ip", "link", "set", "eth0", "down"])
            time.sleep(CUT_S)
            cable.run(1, ["ip", "link", "set", "eth0", "up"])
        (first, weights), (second, others) = job.result()
    if weights != others:
        raise RuntimeError(f"{net}, {loss}: ranks have different weights")
    return max(float(first), float(second)) / steps, weights


def training(args: argparse.Namespace) -> None:
    print(f"\ntraining, {args.steps} steps            harp         tcp    harp by tcp")
    results = set()
    with Cable(offloads=False) as cable:
        for loss, cut in [(0.0, False), *((loss, False) for loss in args.losses), (0.0, True)]:
            times: Dict[str, List[float]] = {net: [] for net in NETS}
            for turn in range(args.rounds):
                for net in NETS[::1 if turn % 2 else -1]:
                    seconds, weights = train(cable, net, args.steps, loss, cut)
                    times[net].append(1e3 * seconds)
                    results.add(weights)
            ratio = statistics.median(a / b for a, b in zip(times["harp"], times["tcp"]))
            label = f"cut of {CUT_S} s" if cut else f"{loss:.1%} lost"
            harp, tcp = (statistics.median(times[net]) for net in NETS)
            print(f"{label:<22}{harp:8.1f} ms {tcp:8.1f} ms    {ratio:.2f}", flush=True)
    print(f"weights of all runs: {'the same' if len(results) == 1 else 'DIFFERENT'}")


def sharing(args: argparse.Namespace) -> None:
    print("\ntwo jobs on 1 Gbit/s                      Gbit/s    Jain's index")
    for queue in args.queues:
        with Cable(rate="1gbit", queue=queue) as cable:
            for pair in PAIRS:
                shares = []
                for _ in range(args.rounds):
                    jobs = [Job(cable, net, REDUCE, number, SECONDS=str(args.seconds))
                            for number, net in enumerate(pair)]
                    for job in jobs:
                        job.wait_ready()
                    for job in jobs:
                        job.begin()
                    shares.append([float(job.result()[0][0]) for job in jobs])
                middle = [statistics.median(share) for share in zip(*shares)]
                jain = statistics.median(sum(s) ** 2 / (len(s) * sum(x * x for x in s)) for s in shares)
                print(f"queue of {queue:<6} {' and '.join(pair):<16}{middle[0]:8.3f} {middle[1]:8.3f}    {jain:.3f}",
                      flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", type=float, nargs="*", default=[0.001, 0.01, 0.05], metavar="SHARE",
                        help="none: no training; default %(default)s")
    parser.add_argument("--queues", nargs="*", default=["5ms", "20ms"], metavar="TIME",
                        help="of the bottleneck; none: no sharing; default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="default %(default)s")
    parser.add_argument("--seconds", type=float, default=4, help="of two jobs; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    args = parser.parse_args()
    print(heading(surroundings(2, [own.VERSION])))
    if args.losses:
        training(args)
    if args.queues:
        sharing(args)


if __name__ == "__main__":
    main()
