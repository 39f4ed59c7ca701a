"""What an all-reduce between hosts takes: lightcc beside torch.distributed's gloo, in the same processes, by turns.

    python bench/multihost.py                         # as root: 2 hosts of 1 rank, then 2 hosts of 2; two minutes
    python bench/multihost.py --hosts 1,1 --sizes 16M,64M --rounds 9
    python bench/multihost.py --loopback              # without root: hosts in name only, joined by the loopback device
    python bench/multihost.py --also old/_lightcc.so  # another build of the core as well, by turns
    python bench/multihost.py --rates 1gbit --hosts 2,2 2,2,2,2 3,1 --flat --cyclic --sizes 16M,64M --rounds 9
    python bench/multihost.py --rates 1gbit --hosts 2,2,2,2 --gradients --rounds 9
    python bench/multihost.py --rates 100mbit 1gbit --hosts 2,2,2,2 --compression topk:0.01 topk:0.001 --rounds 5
    python bench/multihost.py --hosts 1,1 2,2,2,2 --rates 1gbit --harp --sizes 1M,16M --rounds 9
    python bench/multihost.py --hosts 1,1 --openmpi --lone --sizes 4K,64K,1M,16M,64M

The hosts are network namespaces on one bridge, made here and removed at the end (tests/multihost/emulated.py), so all
of them share this machine's cores and memory. Every case is first checked on random numbers. A round takes one sample
of each side, in turning order: the ranks begin together, after a pause, and the slowest counts. It reports medians,
the median of the rounds' ratios with its bootstrap interval, how far the 90th percentile and the largest sample are
from the median, and the CPU seconds of all ranks. Goals that are missed are printed as such, and the exit code stays
0: speed is not a test.

With a rate, every host's cable carries so much each way, and a row is also held against the bound of its wire
(cables.py). Goodput is what the best of five streams each way between two hosts brings, before the rows and once more
after them.
"""
import argparse
import contextlib
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import multihost_driven as driven
import multihost_sides as sides
from cables import emulated, goodput_text, host_text, network_of, parse_hosts, parse_rate
from multihost_model import hold_against_model, model_lines
from multihost_report import TITLE, goals_of, hold_against_wire, lines_of, row_of, wire_line
from peers import gloo, own
from peers.openmpi import OpenMPI
from peers.peer import Unavailable
from report import KIB, MIB
from where import RESULTS, heading, surroundings

SIZES = (4 * KIB, MIB, 16 * MIB, 64 * MIB)


def parse_size(text: str) -> int:
    unit = {"K": KIB, "M": MIB}.get(text[-1:].upper())
    nbytes = int(text[:-1]) * unit if unit else int(text)
    if nbytes < 4 or nbytes % 4:
        raise argparse.ArgumentTypeError(f"{text!r}: whole floats of 4 bytes")
    return nbytes


def parse_compression(text: str) -> str:
    if not re.fullmatch(r"int8|topk(16)?:[\d.e-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r}: int8, or a ratio as topk:0.01 or topk16:0.01")
    return text


def cases_of(args: argparse.Namespace) -> List[sides.Case]:
    many = [sides.gradients()] * args.gradients + [sides.small(count) for count in args.small]
    many += [sides.lone_group()] * args.lone
    many += [sides.step()] * bool(args.compression)
    sizes = args.sizes or (() if many else SIZES)
    return [*map(sides.one_tensor, sizes), *many]


def contest(hosts: Tuple[int, ...], rate: str, args: argparse.Namespace) -> List[Dict[str, Any]]:
    joined = ", joined by loopback" if args.loopback else f", {rate} each" if rate else ""
    joined += f", MTU {args.mtu}" * (args.mtu != 1500) + ", no offloads" * args.no_offloads
    print(f"\n{host_text(hosts)}{joined}", flush=True)
    rows: List[Dict[str, Any]] = []
    cases = cases_of(args)
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(network_of(hosts, args.loopback, rate, min(case.nbytes for case in cases),
                                                 args.mtu, not args.no_offloads))
        python = sides.Sides(stack, network, args)
        from_c = sides_in_c(stack, network) if args.openmpi else {}
        before = python.goodput() if rate else 0.0
        print(TITLE, flush=True)
        for case in cases:
            chosen = {**python.of(case), **(from_c if len(case.counts) == 1 else {})}
            rows.append(row_of(hosts, rate, case, sides.samples_of(chosen, case, args.rounds, args.pause)))
            if len(case.counts) == 1 and from_c:
                open_mpi = from_c[driven.OPEN_MPI]
                rows[-1]["open_mpi"] = {"version": open_mpi.version, "setting": open_mpi.best.setting.name}
            print(lines_of(rows[-1]), flush=True)
        goodput = max(before, python.goodput()) if rate else 0.0
        cluster = python.cluster() if args.model else None
    if rate and args.model:
        for row in rows:
            hold_against_model(row, cluster, goodput)
        print("\n".join(model_lines(rows)), flush=True)
    if rate:
        print(f"{goodput_text(goodput, rate)}; time by the wire's bound:")
        for row in rows:
            hold_against_wire(row, goodput)
            if "bound_s" in row:
                print(wire_line(row), flush=True)
    for row in rows:
        goals = goals_of(row)
        row["goals"] = [{**goal._asdict(), "met": goal.verdict() == "ok"} for goal in goals]
        if goals:
            print("\n".join([row["case"], *[goal.line() for goal in goals]]), flush=True)
    return rows


def sides_in_c(stack: contextlib.ExitStack, network: Any) -> Dict[str, driven.Driven]:
    """Open MPI and lightcc as C calls them, where Open MPI can be measured."""
    why_not = driven.why_no_open_mpi(network.ranks)
    if why_not:
        print(f"LEFT OUT: {driven.OPEN_MPI}: {why_not}", flush=True)
        return {}
    try:
        found = driven.driven_sides(stack, network)
    except Unavailable as why:
        print(f"LEFT OUT: {why}", flush=True)
        return {}
    print(f"{driven.OPEN_MPI}: {found[driven.OPEN_MPI].version}; {driven.BetweenHosts.transport}", flush=True)
    for setting, why in found[driven.OPEN_MPI].left_out.items():
        print(f"LEFT OUT: {driven.OPEN_MPI} ({setting}): {why}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=parse_hosts, nargs="+", default=[(1, 1), (2, 2)], metavar="RANKS,RANKS",
                        help="ranks of each host; default 1,1 2,2")
    parser.add_argument("--sizes", type=lambda text: [parse_size(one) for one in text.split(",")],
                        help="bytes of one tensor, with K or M; default 4K,1M,16M,64M if there is nothing else")
    parser.add_argument("--gradients", action="store_true",
                        help="the 161 gradients of a ResNet-50, 102 MB, beside gloo's ways to send many tensors")
    parser.add_argument("--small", type=int, nargs="+", default=[], metavar="N", help="N tensors of 4 KiB, likewise")
    parser.add_argument("--lone", action="store_true", help="a group of 10 KB after 5 ms of computing, likewise")
    parser.add_argument("--compression", type=parse_compression, nargs="+", default=[], metavar="CODEC",
                        help="topk:RATIO, topk16:RATIO (values as float16) or int8: an optimizer's exchange of the 161 "
                             "gradients of a ResNet-50, when they are ready, dense and so")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each case; default %(default)s")
    parser.add_argument("--pause", type=float, default=0.01, metavar="SECONDS",
                        help="between samples; default %(default)s")
    parser.add_argument("--rates", type=parse_rate, nargs="+", default=[""], metavar="RATE",
                        help="of each host's cable, each way, as 1gbit; none (the default) is what the machine can do")
    parser.add_argument("--flat", action="store_true", help="lightcc without its hierarchy as well, by turns")
    parser.add_argument("--uncalibrated", action="store_true", help="lightcc without calibration as well, by turns")
    parser.add_argument("--harp", nargs="*", choices=list(sides.OVER), default=None,
                        help="lightcc over HARP as well, by turns: its own links, past the kernel, or as NCCL's plugin "
                             "(LIGHTCC_NET_PLUGIN); default harp")
    parser.add_argument("--mtu", type=int, default=1500, help="of emulated hosts; default %(default)s")
    parser.add_argument("--no-offloads", action="store_true", help="every packet passes the cables on its own")
    parser.add_argument("--model", action="store_true",
                        help="lightcc with other algorithms as well, all beside the cost model; with --rates")
    parser.add_argument("--cyclic", action="store_true", help="with ranks dealt to the hosts round robin as well")
    parser.add_argument("--openmpi", action="store_true",
                        help="Open MPI over TCP and lightcc, both called from C, where each rank has a core")
    parser.add_argument("--install", action="store_true", help="first put Open MPI into build/peers, with pip")
    parser.add_argument("--loopback", action="store_true", help="hosts in name only; needs no root")
    parser.add_argument("--also", type=Path, metavar="LIBRARY", help="another build of _lightcc.so")
    parser.add_argument("--json", "--output", type=Path, default=RESULTS / "multihost.json", metavar="FILE",
                        help="gets all samples; default %(default)s")
    parser.add_argument("--png", type=Path, metavar="FILE", help="gets a picture (multihost_picture.py)")
    args = parser.parse_args()
    args.harp = [] if args.harp is None else args.harp or ["harp"]
    if args.loopback and (any(args.rates) or args.openmpi):
        parser.error("--rates, --openmpi: only between emulated hosts")
    if args.model and not all(args.rates):
        parser.error("--model: needs --rates, from which the cables' goodput is known")
    if args.small and max(args.small) < 2:
        parser.error("--small: two tensors or more")
    if not args.loopback and emulated.why_not():
        parser.error(f"{emulated.why_not()}; --loopback does without")
    return args


def main() -> None:
    args = arguments()
    if args.install:
        OpenMPI().install()
    where = surroundings(max(map(sum, args.hosts)), [own.VERSION, gloo.VERSION])
    where["congestion_control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    print(f"{heading(where)}; TCP: {where['congestion_control']}", flush=True)
    rows = [row for rate in args.rates for hosts in args.hosts for row in contest(hosts, rate, args)]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**where, "loopback": args.loopback, "rows": rows}, indent=1))
    print(f"\n{args.rounds} samples each, slowest rank; CPU: of all ranks; results were checked.")
    print(f"All samples: {args.json}")
    if args.png:
        import multihost_picture  # matplotlib is needed for nothing else
        multihost_picture.draw(rows, heading(where), args.png)
        print(f"Picture: {args.png}")


if __name__ == "__main__":
    main()
