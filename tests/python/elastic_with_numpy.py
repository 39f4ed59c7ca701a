"""The part of elastic_training.py that is NumPy's: an ObjectState that holds the weights; a pass goes on with the
samples that its history lacks. For tests that are about the launcher and not about PyTorch's state: such a worker
starts with a tenth of the CPU time."""
import functools
import json

import elastic_numpy_model as numpy_model
import numpy as np

import lightcc.numpy as hvd
from lightcc.core.elastic_state import ObjectState, run_fn


def _reset():
    hvd.shutdown()
    hvd.init()


run = functools.partial(run_fn, reset=_reset)


class Base(ObjectState):
    def __init__(self, **values):
        super().__init__(hvd.broadcast_object, hvd.rank, **values)


def state_of(State, point, **values):
    model = numpy_model.network(values["seed"])
    return State(model=model, momentum=[np.zeros_like(part) for part in model], **values)


def samples_of(state):
    """Those of this rank that are left of the pass; some twice, so that all ranks have equally many."""
    done = {sample for line in state.history.rpartition("\n\n")[2].splitlines() for some in json.loads(line)
            for sample in some}
    order = np.random.default_rng(state.passes).permutation(numpy_model.SAMPLES).tolist()
    left = [sample for sample in order if sample not in done]
    padded = left + left[:-len(left) % hvd.size()]
    return padded[hvd.rank()::hvd.size()]


def step(state, chosen, point):
    weight, bias = numpy_model.gradients(state.model, chosen)
    sent = hvd.allreduce_async(bias, name="bias")
    point("allreduce")
    reduced = [hvd.allreduce(weight, name="weight"), hvd.synchronize(sent)]
    point("backward")
    state.model, state.momentum = numpy_model.stepped(state.model, state.momentum, reduced)


def begin_pass(state):
    """The order of the samples follows from the number of the pass."""


def weights(state):
    return numpy_model.weights(state.model)
