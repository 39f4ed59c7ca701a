"""Parts of one host that act as nodes, and gradients whose sums are exact, for checks of compression without torch."""
import os

import numpy as np

import lightcc.numpy as hvd

SHAPES = {"a": (128, 80), "bias": (4096,), "odd": (5, 43, 47), "embedding": (64, 80)}
COMPRESSED = ("a", "odd")
_OURS = ("LIGHT_INTRA_SIZE", "LIGHT_TOPK_THRESHOLD", "LIGHT_TOPK_ALLREDUCE", "LIGHT_TOPK_RATIO")


def begin(intra=1, **knobs):
    """Another epoch, in which so many ranks of this host are a node; 0: all."""
    end()
    os.environ.update({"LIGHT_INTRA_SIZE": str(intra), "LIGHT_TOPK_THRESHOLD": "0", **knobs})
    hvd.init()


def end():
    hvd.shutdown()
    for name in _OURS:
        os.environ.pop(name, None)


def gradient(name, step, rank=None):
    """Small integers, of which few are large."""
    random = np.random.default_rng([step, hvd.rank() if rank is None else rank, *name.encode()])
    values = random.integers(-3, 4, SHAPES[name])
    values[random.random(SHAPES[name]) < 0.02] *= 20
    return values.astype(np.float32)


def dense(name, steps):
    """What all ranks' gradients of these steps add up to."""
    return sum(gradient(name, step, rank).astype(np.float64) for step in steps for rank in range(hvd.size()))


def left(saved, name, shape):
    """The sum over nodes of what was left behind of a tensor."""
    total = np.zeros(int(np.prod(shape)))
    for piece in (saved or {"tensors": {}})["tensors"].get(name, {"pieces": []})["pieces"]:
        if piece["part"] == 0:
            total[piece["first"]:piece["first"] + len(piece["values"])] += piece["values"]
    return total.reshape(shape)
