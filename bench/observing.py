"""What it costs to be watched: the metrics that a job shows, and spans for profilers.

    lightccrun -np 2 python bench/observing.py [--repeats 300]

Metrics: each rank's thread wakes every two seconds, and rank 0's also makes the page. That is timed call by call, as
the thread's own CPU time, and given as a share of these two seconds: so much longer a step takes at most, a ResNet-20's
as any other. Noise between runs with and without would hide it. Spans: a call of a spanned method that does nothing,
less that of a plain one. Prints medians on rank 0, each with its goal; the exit code is 0 where one is missed.
"""
import argparse
import statistics
import time
import timeit
from typing import Callable

import torch

import lightcc.torch as hvd
from lightcc.core import metrics, metrics_page
from lightcc.torch.spans import spanned

_CALLS = 2000  # of a method in one sample


class _Methods:
    def plain(self) -> None:
        pass

    @spanned("lightcc.bench")
    def spanned(self) -> None:
        pass


def cpu_us(function: Callable[[], object], repeats: int) -> float:
    """Microseconds of this thread."""
    samples = []
    for _ in range(repeats):
        began = time.thread_time_ns()
        function()
        samples.append((time.thread_time_ns() - began) * 1e-3)
    return statistics.median(samples)


def span_us(samples: int = 30) -> float:
    methods = _Methods()
    methods.spanned()

    def once(function: Callable[[], object]) -> float:
        return timeit.timeit(function, timer=time.thread_time, number=_CALLS) / _CALLS * 1e6
    return statistics.median(once(methods.spanned) - once(methods.plain) for _ in range(samples))


def row(what: str, value: float, unit: str, goal: float) -> None:
    if hvd.rank() == 0:
        print(f"{what:<58}{value:9.4f} {unit:<8} goal <= {goal:g}: {'ok' if value <= goal else 'MISSED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=300, help="of each part; default %(default)s")
    args = parser.parse_args()
    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(20)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters())
    for _ in range(20):  # the counters have something to say
        optimizer.zero_grad()
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
    watched = metrics_page._Publisher("", False)  # not started: its work is done here
    report = cpu_us(watched._report, args.repeats)
    hvd.barrier()
    page = cpu_us(watched.page, args.repeats)
    per_wake = 1e-4 / metrics_page.REPORT_S  # microseconds to percent of the time
    row("metrics of a rank, of the time", report * per_wake, "%", 0.1)
    row("metrics and page of rank 0, of the time", (report + page) * per_wake, "%", 0.1)
    row("hvd.metrics()", cpu_us(metrics.metrics, args.repeats), "us", 200)
    row("a span, no profiler", span_us(), "us", 0.2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        on = span_us()
    row("a span, torch.profiler records", on, "us", 2)


if __name__ == "__main__":
    main()
