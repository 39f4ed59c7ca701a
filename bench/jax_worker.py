"""A rank of jax_collectives.py: `jax_worker.py BACKEND MIB,MIB` times JAX's collectives over one backend, each the
median of some calls in milliseconds, and prints them as "found {...}"."""
import functools
import json
import os
import statistics
import sys
import time

BACKEND, MIB = sys.argv[1], [int(mib) for mib in sys.argv[2].split(",")]
if BACKEND == "lightcc":
    import lightcc.jax  # noqa: F401  before jax

# ruff: noqa: E402
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

if BACKEND != "lightcc":
    jax.config.update("jax_cpu_collectives_implementation", BACKEND)
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
                               int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
shard_map = jax.shard_map
RANKS = jax.device_count()
MESH = jax.make_mesh((RANKS,), ("x",))
SPREAD, EVERYWHERE = PartitionSpec("x"), PartitionSpec()


def on_mesh(function, out=SPREAD):
    return jax.jit(shard_map(function, mesh=MESH, in_specs=SPREAD, out_specs=out, check_vma=False))


def array(each):
    """As many floats on each rank."""
    mine = np.ones(each, np.float32)
    return jax.make_array_from_process_local_data(NamedSharding(MESH, SPREAD), mine)


def milliseconds(function, *arguments, calls):
    for _ in range(3):
        jax.block_until_ready(function(*arguments))
    took = []
    for _ in range(calls):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        took.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(took)


def training_step():
    """Of a perceptron with a million parameters, data parallel: gradients are means over the ranks."""
    widths = (256, 512, 1024, 256, 10)
    weights = [jnp.ones((a, b)) / a for a, b in zip(widths, widths[1:])]
    weights = jax.device_put(weights, NamedSharding(MESH, EVERYWHERE))

    def loss(weights, x):
        return jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), weights, x))

    @jax.jit
    def step(weights, x):
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights, x))
    return step, weights, array((16, widths[0]))


def main():
    one = array(1)
    found = {
        "psum of one float": milliseconds(on_mesh(lambda x: lax.psum(x, "x")), one, calls=200),
        "100 psums of one float": milliseconds(
            on_mesh(lambda x: jnp.stack([lax.psum(x * (i + 1), "x") for i in range(100)]), PartitionSpec(None, "x")),
            one, calls=20)}
    ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]
    for mib in MIB:
        count = mib << 18
        calls = 50 if mib < 16 else 7
        whole, part = array(count), array(count // RANKS)
        found.update({
            f"psum of {mib} MiB": milliseconds(on_mesh(lambda x: lax.psum(x, "x")), whole, calls=calls),
            f"all_gather of {mib} MiB": milliseconds(on_mesh(lambda x: lax.all_gather(x, "x", tiled=True)), part,
                                                     calls=calls),
            f"psum_scatter of {mib} MiB": milliseconds(on_mesh(lambda x: lax.psum_scatter(x, "x", tiled=True)), whole,
                                                       calls=calls),
            f"all_to_all of {mib} MiB": milliseconds(on_mesh(lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True)), whole,
                                                     calls=calls),
            f"ppermute of {mib} MiB": milliseconds(on_mesh(lambda x: lax.ppermute(x, "x", ring)), whole, calls=calls)})
    step, weights, batch = training_step()
    found["training step"] = milliseconds(step, weights, batch, calls=30)
    print(f"found {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
