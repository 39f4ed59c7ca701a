"""The curve of lightcc-explain --png. Needs matplotlib."""

from typing import Callable

from lightcc.explain.model import Candidate

_SIZES = [1 << power for power in range(10, 31)]


def draw(predict: Callable[[int], list[Candidate]], title: str, path: str) -> None:
    """Seconds of every algorithm by bytes, from 1 KiB to 1 GiB, into a PNG. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"--png needs matplotlib ({error}); pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves: dict[str, list[float]] = {}
    for nbytes in _SIZES:
        for one in predict(nbytes):
            curves.setdefault(one.name, []).append(1e3 * one.seconds)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, milliseconds in sorted(curves.items(), key=lambda curve: curve[1][-1]):
        axes.plot([nbytes / (1 << 20) for nbytes in _SIZES], milliseconds, label=name)
    axes.set(xscale="log", yscale="log", xlabel="MiB of an all-reduce", ylabel="predicted ms", title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
