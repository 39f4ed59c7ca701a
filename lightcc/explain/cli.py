"""lightcc-explain: which algorithm an all-reduce takes, how long, and why; and where a recorded step's time went."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Optional

from lightcc.explain import fewer, picture
from lightcc.explain.cluster import Cluster, Training, load
from lightcc.explain.merge import merge
from lightcc.explain.model import Candidate, candidates
from lightcc.explain.step import COMPUTE, COPY, EXCHANGE, QUEUE, WAIT, Step, median_step

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SHOWN_SHARE = 0.1  # of a step: from here on something is worth advice
_ADVICE = {
    WAIT: "the others wait for rank {rank}, the last for {share:.0%} of the tensors: look at its input pipeline, its "
          "cores and its host",
    QUEUE: "collectives wait for the one before: what is reduced together is fused up to HOROVOD_FUSION_THRESHOLD",
    COPY: "fused tensors are copied together and back: fewer of them, or gradients as views of one buffer, need less",
    EXCHANGE: "the exchange itself: fewer bytes (compression=hvd.Compression.fp16, or lightcc's Top-K: "
              "docs/compression.md), or less often (backward_passes_per_step)",
}


def parse_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of bytes, as 4096, 64K, 64M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number between 0 and 1")
    return value


def time_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def bytes_text(nbytes: int) -> str:
    unit = next(unit for unit in "GMK " if unit == " " or nbytes >= _UNITS[unit])
    return f"{nbytes} bytes" if unit == " " else f"{nbytes / _UNITS[unit]:.4g} {unit}iB"


def cluster_text(cluster: Cluster) -> str:
    per_host = set(cluster.hosts)
    hosts, each = len(cluster.hosts), f"of {cluster.hosts[0]}" if len(per_host) == 1 else "of different sizes"
    nics = f"{cluster.nics} x {cluster.nic_gbit_per_s:g} Gbit/s"
    return f"{cluster.ranks} ranks on {hosts} host{'s' * (hosts > 1)} {each}, {nics} each"


def ranking_lines(ways: list[Candidate]) -> list[str]:
    """A table, the quickest way first, with what makes each other one slower."""
    lines = [f"{'algorithm':<26} {'time':>9} {'by best':>8} {'start-ups':>10} {'transfer':>10} {'on hosts':>10}  "
             "bound by"]
    best = ways[0]
    for one in ways:
        lines.append(f"{one.name:<26} {time_text(one.seconds):>9} {one.seconds / best.seconds:>8.2f} "
                     f"{time_text(one.latency_s):>10} {time_text(one.transfer_s):>10} {time_text(one.local_s):>10}  "
                     f"{one.bound_by}{why_lost(one, best)}")
    return lines


def why_lost(one: Candidate, best: Candidate) -> str:
    if one is best:
        return ""
    more = {"start-ups": one.latency_s - best.latency_s, "bytes on the way": one.transfer_s - best.transfer_s,
            "work on the hosts": one.local_s - best.local_s}
    what = max(more, key=lambda name: more[name])
    return f"; {time_text(more[what])} more {what}" if more[what] > 0 else ""


def collective_lines(cluster: Cluster, nbytes: int, ways: list[Candidate]) -> list[str]:
    if not ways:
        return ["one rank: nothing to reduce"]
    best = ways[0]
    lanes = f", {best.lanes} lanes, {best.chunks} chunks" if best.algorithm in ("2d", "compressed") else ""
    return [f"all-reduce of {bytes_text(nbytes)} among {cluster_text(cluster)}:",
            f"{best.name}{lanes}: {time_text(best.seconds)}", "", *ranking_lines(ways)]


def training_lines(cluster: Cluster, training: Training, ways: list[Candidate]) -> list[str]:
    """Samples a second with the best of each algorithm; beside what was published."""
    speed = {}
    for one in reversed(ways):  # the best of each comes last
        exposed = one.seconds * (1 - training.overlap)
        speed[one.algorithm] = cluster.ranks * training.samples_per_rank / (training.compute_ms * 1e-3 + exposed)
    lines = ["", f"training, {training.gradient_mbyte:g} MB of gradients a step of {training.compute_ms:g} ms, "
                 f"{training.overlap:.0%} of the communication hidden:"]
    for name, rate in sorted(speed.items(), key=lambda entry: -entry[1]):
        published = f", published {training.published[name]:g}" if name in training.published else ""
        lines.append(f"  {name:<20} {rate:10.1f} samples/s{published}")
    known = [name for name in training.published if name in speed]
    lines += [f"  {a} to {b}: predicted {speed[a] / speed[b]:.3f}, published "
              f"{training.published[a] / training.published[b]:.3f}" for a, b in zip(known, known[1:])]
    return lines


def fewer_lines(args: argparse.Namespace, cluster: Cluster, nbytes: int) -> list[str]:
    """What fewer exchanges would bring: a row for each way to train."""
    def dense(count: int) -> float:
        return next((one.seconds for one in candidates(cluster, count, 0.0, args.simulate)), 0.0)

    def compressed(count: int) -> Optional[float]:
        found = candidates(cluster, count, args.compressed, args.simulate)
        return next((one.seconds for one in found if one.algorithm == "compressed"), None)

    ways = fewer.ways(dense, nbytes, len(cluster.hosts), args.compute_ms * 1e-3, args.sync_every, args.fragments,
                      args.delay, args.compressed, compressed)
    lines = ["", f"training, {bytes_text(nbytes)} of gradients, {time_text(args.compute_ms * 1e-3)} of computing a "
                 f"step, sync_every={args.sync_every}, fragments={args.fragments}, delay={args.delay}:",
             f"{'way':<28} {'step':>9} {'exposed':>9} {'sent by a host':>16}"]
    return lines + [f"{way.name:<28} {time_text(way.step_s):>9} {time_text(way.exposed_s):>9} "
                    f"{way.bytes_per_s / 1e6:>11.4g} MB/s" for way in ways]


def step_lines(step: Step) -> list[str]:
    lines = [f"step {step.number + 1} of {step.count} (the median): {time_text(step.seconds)}; {step.tensors} tensors, "
             f"{bytes_text(step.nbytes)}, in {step.collectives} collectives"]
    names = {COMPUTE: "nothing in flight: the ranks compute",
             EXCHANGE: "exchange: " + ", ".join(f"{name} {count}" for name, count in step.algorithms.items())}
    lines += [f"  {time_text(seconds):>9} {seconds / step.seconds:>4.0%}  {names.get(part, part)}"
              for part, seconds in sorted(step.parts.items(), key=lambda entry: -entry[1]) if seconds]
    lines += [f"  {time_text(step.exposed):>9} {step.exposed / step.seconds:>4.0%}  of that after the last tensor was "
              "ready everywhere: no computation can hide it"]
    lines += [f"  {time_text(seconds):>9}       {phase}" for phase, seconds in step.phases.items()]
    advice = [f"  {_ADVICE[part].format(rank=step.last_rank, share=step.last_rank_share)}"
              for part in sorted(_ADVICE, key=lambda part: -step.parts[part])
              if step.parts[part] >= _SHOWN_SHARE * step.seconds and (part != WAIT or step.last_rank is not None)]
    return lines + (["what would shorten it, the largest first:", *advice] if advice else
                    ["communication is less than a tenth of it: nothing of lightcc's would shorten it much"])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightcc-explain", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--np", type=positive, help="ranks, spread evenly over --hosts")
    what.add_argument("--cluster", metavar="FILE", help="a cluster file (docs/explain.md)")
    what.add_argument("--step", metavar="TIMELINE", help="says where the time of a recorded step went")
    what.add_argument("--merge", nargs="+", metavar="FILE", help="puts timelines of all ranks, and profiles of "
                      "PyTorch, into one file for Perfetto (docs/timeline.md)")
    parser.add_argument("--output", metavar="FILE", default="merged.json", help="of --merge; default merged.json")
    parser.add_argument("--hosts", type=positive, default=None, help="with --np; default 1")
    parser.add_argument("--bytes", type=parse_bytes, default=None, metavar="SIZE", help="of the all-reduce, as 64M "
                        "(the default; with a section training in the cluster file its gradients)")
    parser.add_argument("--nic-gbit", type=float, default=None, metavar="RATE",
                        help="with --np: of each host; default 25")
    parser.add_argument("--compressed", type=share, default=0.0, metavar="SHARE",
                        help="a codec's bytes for each byte, as 0.02 for Top-K of 1 %%; default: no codec")
    parser.add_argument("--simulate", action="store_true", help="message by message, up to 4096 ranks")
    parser.add_argument("--compute-ms", type=float, default=None, metavar="MS", help="of a step without communication: "
                        "predicts training with fewer exchanges, too (docs/fewer_exchanges.md)")
    parser.add_argument("--sync-every", type=positive, default=30, help="of LocalSGD and DiLoCo, in steps; default 30")
    parser.add_argument("--fragments", type=positive, default=1, help="of DiLoCo; default 1")
    parser.add_argument("--delay", type=int, default=0, help="of DiLoCo, in steps; default 0")
    parser.add_argument("--png", metavar="FILE", help="gets the curves, from 1 KiB to 1 GiB (needs matplotlib)")
    return parser


def evenly(ranks: int, hosts: int) -> list[int]:
    return [ranks // hosts + (host < ranks % hosts) for host in range(hosts)]


def explain(args: argparse.Namespace) -> list[str]:
    if args.step:
        return step_lines(median_step(args.step))
    if args.merge:
        return [merge(args.merge, args.output)]
    training = None
    if args.cluster:
        if args.hosts or args.nic_gbit:
            raise ValueError("--hosts and --nic-gbit go with --np; a cluster file says both itself")
        cluster, training = load(args.cluster)
    else:
        hosts = args.hosts or 1
        if hosts > args.np:
            raise ValueError(f"--hosts {hosts}: more than --np {args.np} ranks")
        cluster = dataclasses.replace(Cluster(evenly(args.np, hosts)), nic_gbit_per_s=args.nic_gbit or 25.0)

    def predict(nbytes: int) -> list[Candidate]:
        return candidates(cluster, nbytes, args.compressed, args.simulate)

    gradients = int(training.gradient_mbyte * 1e6) if training else 64 << 20
    nbytes = gradients if args.bytes is None else args.bytes
    ways = predict(nbytes)
    lines = collective_lines(cluster, nbytes, ways)
    if training and ways:
        lines += training_lines(cluster, training, predict(gradients))
    if args.compute_ms is not None:
        lines += fewer_lines(args, cluster, nbytes)
    if args.png:
        picture.draw(predict, cluster_text(cluster), args.png)
    return lines


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    try:
        print("\n".join(explain(args)))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
