"""What the examples of mixed precision share: data, policies, command line and picture.

The data, of 442 patients with diabetes, come with scikit-learn; 128 of them are fitted to the end, so that the last
digits of the weights count.
"""
import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

from lightcc.amp import Always, AnyOf, HoldAfterLearningRateChange, OnPlateau

STEPS, DECAYS = 1500, (900, 1200)  # the learning rate falls to a tenth at each of these
SAMPLES, HIDDEN, RATE = 128, 64, 1e-3
COLOURS = {"float32": "#2980b9", "bfloat16": "#e67e22"}


def load(seed, rank, size):
    """This rank's part of the samples: (features [n, 10], targets [n, 1]), float32 of mean 0 and deviation 1."""
    x, y = load_diabetes(return_X_y=True, scaled=True)
    mine = np.random.default_rng(seed).permutation(len(y))[:SAMPLES][rank::size]
    return ((x / x.std(axis=0))[mine].astype(np.float32), ((y - y.mean()) / y.std())[mine, None].astype(np.float32))


def rate_of(step):
    return RATE * 0.1 ** sum(step >= decay for decay in DECAYS)


def policies(steps=STEPS):
    """By name. Patience and holds are shorter where a trial run has fewer steps."""
    return {"full": lambda: Always("float32"), "bfloat16": lambda: Always("bfloat16"),
            "switching": lambda: AnyOf(OnPlateau(patience=max(1, steps // 15)),
                                       HoldAfterLearningRateChange(hold_step=max(1, steps // 10)))}


def run(train, hvd, description):
    """Trains with each policy and seed: train(policy, seed, steps) -> (losses of all ranks, levels)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--policies", nargs="+", default=[*policies()], choices=[*policies()])
    parser.add_argument("--output", type=Path, default=Path("build", "amp"), help="folder for run.json and run.png")
    options = parser.parse_args()
    found: dict = {name: [] for name in options.policies}
    for seed in options.seeds:
        for name in options.policies:
            losses, levels = train(policies(options.steps)[name](), seed, options.steps)
            found[name].append({"seed": seed, "losses": losses, "levels": levels})
            if hvd.rank() == 0:
                mixed = sum(level != "float32" for level in levels) / len(levels)
                print(f"seed {seed}, {name:9}: final loss {losses[-1]:.1e}, {mixed:.0%} of the steps in bfloat16",
                      flush=True)
    if hvd.rank() == 0:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "run.json").write_text(json.dumps({"ranks": hvd.size(), "runs": found}))
        draw(found, f"{hvd.size()} ranks" if hvd.size() > 1 else "1 rank", options.output / "run.png")


def final(runs):
    """The median of the final losses."""
    return statistics.median(run["losses"][-1] for run in runs)


def draw(found, title, path):
    """The losses of the first seed, in two colours: of steps in full and in mixed precision."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, len(found), figsize=(4.2 * len(found), 3.4), sharey=True, squeeze=False)
    for axis, (name, runs) in zip(axes[0], found.items()):
        losses, levels = np.array(runs[0]["losses"]), np.array(runs[0]["levels"])
        for level, colour in COLOURS.items():
            axis.plot(np.where(levels == level, losses, np.nan), color=colour, label=level)
        axis.set(title=f"{name}: {final(runs):.0e}", yscale="log", xlabel="step")
    axes[0][0].set_ylabel("loss")
    axes[0][-1].legend()
    figure.suptitle(f"Diabetes, {title}; the learning rate falls at {' and '.join(map(str, DECAYS))}")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
