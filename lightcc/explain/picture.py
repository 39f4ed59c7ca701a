"""The curves of lightcc-explain --png. Needs matplotlib."""

import math
from typing import Callable, Dict, List

from lightcc.explain.model import Candidate

_SIZES = [1 << power for power in range(10, 31)]
_SHOWN_RATIO = 10.0  # of the second panel: what is slower by more is no candidate

Curves = Dict[str, List[float]]


def by_best(curves: Curves) -> Curves:
    """Each curve divided by the lowest at the same size; NaN where it has no value.

    >>> by_best({"ring": [4.0, 3.0], "2d": [2.0, 6.0]})
    {'ring': [2.0, 1.0], '2d': [1.0, 2.0]}
    """
    best = [min(value for value in values if value == value) for values in zip(*curves.values())]
    return {name: [value / least for value, least in zip(values, best)] for name, values in curves.items()}


def draw(predict: Callable[[int], list[Candidate]], title: str, path: str) -> None:
    """All algorithms from 1 KiB to 1 GiB, into a PNG: milliseconds, and below that the ratio to the best of each size.
    Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"--png needs matplotlib ({error}); pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: Curves = {}
    for i, nbytes in enumerate(_SIZES):
        for one in predict(nbytes):
            curves.setdefault(one.name, [math.nan] * len(_SIZES))[i] = 1e3 * one.seconds
    sizes, ratios = [nbytes / (1 << 20) for nbytes in _SIZES], by_best(curves)
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 7), layout="constrained",
                                             gridspec_kw={"height_ratios": (3, 2)})
    for name, milliseconds in sorted(curves.items(), key=lambda curve: curve[1][-1]):
        above.plot(sizes, milliseconds, label=name)
        below.plot(sizes, ratios[name])
    above.set(xscale="log", yscale="log", ylabel="predicted ms", title=title)
    above.legend()
    below.set(ylim=(0.9, _SHOWN_RATIO), yscale="log", xlabel="MiB of an all-reduce", ylabel="time by best")
    below.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
    for axes in (above, below):
        axes.grid(True, which="major", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
