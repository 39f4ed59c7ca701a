"""Programs that tests of JAX start, each as a whole."""

# It knows nothing of lightcc, unless the first line imports it, and may call jax.distributed itself.
SUM = """
{before}
import jax
{begin}
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("x",))
values = np.arange(float(jax.device_count()))
x = jax.make_array_from_callback(values.shape, NamedSharding(mesh, P("x")), lambda index: values[index])
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, P()))(x)
print(f"{{jax.process_index()}} of {{jax.process_count()}}: {{float(total):g}}", flush=True)
import sys
if "lightcc.core.lib" in sys.modules:
    print("collectives", sys.modules["lightcc.core.lib"].counters()["collectives"] > 0, flush=True)
"""

# Sums without end; rank 1 does as {fate} says after ten of them.
SUMS = """
import os, signal, sys, time
import lightcc.jax
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jax import shard_map
mesh = lightcc.jax.mesh("x")
x = jax.make_array_from_callback((jax.device_count(),), NamedSharding(mesh, P("x")), lambda i: np.arange(9.0)[i])
def of(operation):
    return jax.jit(shard_map(operation, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
psum, gather = of(lambda x: jax.lax.psum(x, "x")), of(lambda x: jax.lax.all_gather(x, "x", tiled=True))
try:
    for turn in range(10 ** 9):
        jax.block_until_ready(psum(x))
        if turn == 9 and jax.process_index() == 1:
            print("now", time.time(), flush=True)
            {fate}
        if turn == 9 and jax.process_index() == 0:
            {other}
except Exception as error:
    print("seen", time.time(), flush=True)
    raise
"""

# A process that it spawns imports it again; there JAX knows that process alone.
SPAWNS = """
import lightcc.jax
import jax, multiprocessing

def work(queue):
    try:
        asked = lightcc.jax.size()
    except RuntimeError as error:
        asked = error
    queue.put((jax.process_count(), int(jax.numpy.ones(2).sum()), str(asked)))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    count, ones, asked = queue.get(timeout=240)
    child.join()
    assert jax.process_count() == lightcc.jax.size() == 2
    print(f"child of {count}, ones {ones}", flush=True)
    print("asked:", asked, flush=True)
"""

# A model of flax, with statistics of batches, that learns the same on any number of processes; prints each step's loss.
FLAX = """
import lightcc.jax
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.hidden(x))))

rank, size = lightcc.jax.rank(), lightcc.jax.size()
mesh = lightcc.jax.mesh("batch")
spread, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
graph, *states = nnx.split(Net(nnx.Rngs(rank)), nnx.Param, ...)
parameters, rest = jax.device_put(lightcc.jax.broadcast_parameters(jax.tree.map(np.asarray, states)), everywhere)
optimizer = optax.adam(0.01)
slots = jax.jit(optimizer.init, out_shardings=everywhere)(parameters)

@jax.jit
def step(parameters, rest, slots, x, y):
    def loss_of(parameters):
        model = nnx.merge(graph, parameters, rest, copy=True)
        return ((model(x)[:, 0] - y) ** 2).mean(), nnx.state(model, nnx.Not(nnx.Param))
    (loss, after), gradients = jax.value_and_grad(loss_of, has_aux=True)(parameters)
    updates, slots = optimizer.update(gradients, slots, parameters)
    return optax.apply_updates(parameters, updates), after, slots, loss

for seed in range(30):
    x = np.random.default_rng(seed).normal(size=(64, 8)).astype("float32")
    mine = (x[rank::size], np.sin(x.sum(axis=1))[rank::size])
    parameters, rest, slots, loss = step(parameters, rest, slots,
                                         *(jax.make_array_from_process_local_data(spread, one) for one in mine))
    print("loss", float(loss), flush=True)
print("mean", float(np.asarray(rest.norm.mean[...])[0]), flush=True)
"""
