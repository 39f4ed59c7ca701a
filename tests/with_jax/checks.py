"""A rank that checks every operation of JAX over lightcc against NumPy: `checks.py [TURNS]`. Run by test_jax.py under
launchers, with any number of ranks."""
import functools
import itertools
import sys
import threading

import lightcc.jax as hvd  # isort: skip  before jax

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_enable_x64", True)
shard_map = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map
RANK, SIZE = hvd.rank(), hvd.size()
TURNS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64",
          "complex64", "complex128")


def meshes():
    """One axis of all ranks; two axes; and orders that are not that of the ranks."""
    devices = np.array(jax.devices())
    yield jax.sharding.Mesh(devices, ("x",)), "x"
    if SIZE % 2 == 0:
        mesh = jax.sharding.Mesh(devices.reshape(-1, 2), ("x", "y"))
        yield from ((mesh, axis) for axis in ("x", "y"))
    if SIZE == 2:
        yield jax.sharding.Mesh(devices.reshape(2, 1), ("x", "y")), "x"
    if SIZE == 3:
        yield jax.sharding.Mesh(devices[[1, 2, 0]], ("x",)), "x"
    if SIZE > 2:
        yield jax.sharding.Mesh(devices[::-1], ("x",)), "x"


def numbers(dtype, seed, shape):
    """Whole numbers that sums of float32 hold exactly; for unsigned ones some beyond the signed range."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype.startswith("u"):
        return random.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
    whole = random.integers(-9, 9, shape)
    return (whole + 1j * random.integers(-9, 9, shape) if dtype.startswith("complex") else whole).astype(dtype)


def spread(mesh, values):
    """An array whose axis 0 is spread over all devices of the mesh."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, P(mesh.axis_names)), lambda i: values[i])


def on_mesh(mesh, function, tree, jit=True):
    """What function makes of each device's part of the arrays of the tree; one program for all of them."""
    part = P(mesh.axis_names)
    mapped = shard_map(lambda tree: jax.tree.map(function, tree), mesh=mesh, in_specs=part, out_specs=part)
    return (jax.jit(mapped) if jit else mapped)(jax.tree.map(lambda values: spread(mesh, values), tree))


def expect(mesh, result, parts, what):
    """parts: by place in the mesh, flat, what its device must hold."""
    order = [device.id for device in mesh.devices.flat]
    for shard in result.addressable_shards:
        expected = parts[order.index(shard.device.id)]
        np.testing.assert_array_equal(np.asarray(shard.data), expected, err_msg=what)


def along(mesh, axis):
    """By place in the mesh, flat: the places that are with it on that axis, in order, and its own index there."""
    places = [*np.ndindex(*mesh.devices.shape)]
    at = mesh.axis_names.index(axis)
    for place in places:
        with_it = [i for i, other in enumerate(places)
                   if other[:at] + other[at + 1:] == place[:at] + place[at + 1:]]
        yield with_it, place[at]


def check_reductions():
    """Of all dtypes; bool JAX adds up as integers, and there is no minimum of complex numbers."""
    for mesh, axis in meshes():
        values = {dtype: numbers(dtype, 3, (mesh.size * 4, 3)) for dtype in DTYPES if dtype != "bool"}
        ordered = {dtype: value for dtype, value in values.items() if not dtype.startswith("complex")}
        for operation, combine, tree in ((lax.psum, np.add, values), (lax.pmax, np.maximum, ordered),
                                         (lax.pmin, np.minimum, ordered)):
            result = on_mesh(mesh, lambda x, operation=operation: operation(x, axis), tree)
            for dtype, value in tree.items():
                parts = np.split(value, mesh.size)
                expected = [functools.reduce(combine, [parts[i] for i in group]) for group, _ in along(mesh, axis)]
                assert result[dtype].dtype == dtype
                expect(mesh, result[dtype], expected, f"{operation} of {dtype} over {axis} of {mesh}")


def check_movements():
    for mesh, axis in meshes():
        n, groups = mesh.shape[axis], [*along(mesh, axis)]
        values = {dtype: numbers(dtype, 5, (mesh.size * n * 2, 3)) for dtype in DTYPES}
        sums = {dtype: value for dtype, value in values.items() if dtype != "bool"}
        gathered = on_mesh(mesh, lambda x: lax.all_gather(x, axis, tiled=True), values)
        scattered = on_mesh(mesh, lambda x: lax.psum_scatter(x, axis, tiled=True), sums)
        exchanged = on_mesh(mesh, lambda x: lax.all_to_all(x, axis, 0, 0, tiled=True), values)
        for dtype, value in values.items():
            parts, what = np.split(value, mesh.size), f"of {dtype} over {axis} of {mesh}"
            expect(mesh, gathered[dtype], [np.concatenate([parts[i] for i in group]) for group, _ in groups],
                   f"all_gather {what}")
            expect(mesh, exchanged[dtype],
                   [np.concatenate([np.split(parts[i], n)[own] for i in group]) for group, own in groups],
                   f"all_to_all {what}")
            if dtype in sums:
                totals = [functools.reduce(np.add, [parts[i] for i in group]) for group, _ in groups]
                expect(mesh, scattered[dtype],
                       [np.split(total, n)[own] for total, (_, own) in zip(totals, groups)], f"psum_scatter {what}")


def check_permutations():
    for mesh, axis in meshes():
        n = mesh.shape[axis]
        values = {dtype: numbers(dtype, 7, (mesh.size * 2, 3)) for dtype in ("float32", "int8", "complex128")}
        ring = [(i, (i + 1) % n) for i in range(n)]
        for pairs in (ring, [(i, n - 1 - i) for i in range(n)], ring[:1], ring[:-1], [(i, i) for i in range(n)]):
            source = {to: start for start, to in pairs}
            result = on_mesh(mesh, lambda x, pairs=pairs: lax.ppermute(x, axis, pairs), values)
            for dtype, value in values.items():
                parts = np.split(value, mesh.size)
                expected = [parts[group[source[own]]] if own in source else np.zeros_like(parts[0])
                            for group, own in along(mesh, axis)]
                expect(mesh, result[dtype], expected, f"ppermute {pairs} of {dtype} over {axis} of {mesh}")


def check_random_scatters():
    """Sums of random whole numbers over two axes, one after the other."""
    rows = 2 if SIZE % 2 == 0 else 1
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(rows, -1), ("x", "y"))
    both = jax.jit(lambda x: shard_map(
        lambda part: lax.psum_scatter(lax.psum_scatter(part, "x", tiled=True), "y", tiled=True), mesh=mesh,
        in_specs=P(("x", "y")), out_specs=P(("x", "y")))(x))
    for turn in range(10 * TURNS):
        values = numbers("float64", turn, (SIZE * SIZE * 2, 5))
        total = np.add.reduce(np.split(values, SIZE))
        result = both(spread(mesh, values))
        for shard in result.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), total[shard.index])


def check_transformations():
    """Gradients, batches and loops of what has a collective inside; without jit as well."""
    mesh = hvd.mesh("x")
    values = np.arange(SIZE * 2.0)
    weights = jax.device_put(np.float64(3), NamedSharding(mesh, P()))

    def loss(weight, x):
        mapped = shard_map(lambda w, part: lax.pmean(jnp.mean(w * part ** 2), "x"), mesh=mesh,
                           in_specs=(P(), P("x")), out_specs=P())
        return mapped(weight, x)

    given = spread(mesh, values)
    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        np.testing.assert_allclose(gradient(weights, given), np.mean(values ** 2))
    total = values.reshape(SIZE, 2).sum(0)
    mapped = on_mesh(mesh, jax.vmap(lambda x: lax.psum(x, "x")), values)
    expect(mesh, mapped, [total] * SIZE, "vmap")

    ring = [(i, (i + 1) % SIZE) for i in range(SIZE)]

    def loop(part):
        return lax.scan(lambda carry, _: (lax.ppermute(carry + 1, "x", ring), None), part, None, length=20)[0]
    expect(mesh, on_mesh(mesh, loop, values), np.roll(values.reshape(SIZE, 2), 20, axis=0) + 20, "scan")
    expect(mesh, on_mesh(mesh, lambda x: lax.psum(x, "x"), values, jit=False), [total] * SIZE, "without jit")


def check_automatic_sharding():
    """XLA chooses the collectives of a product whose factors are spread both ways."""
    for (mesh, _), ways in itertools.product(meshes(), ((P("x"), P()), (P(None, "x"), P("x")), (P("x"), P("x")))):
        left, right = numbers("float64", 1, (SIZE * 4, SIZE * 2)), numbers("float64", 2, (SIZE * 2, 3))
        factors = [jax.make_array_from_callback(value.shape, NamedSharding(mesh, way), lambda index, v=value: v[index])
                   for value, way in zip((left, right), ways)]
        product = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P()))(*factors)
        np.testing.assert_allclose(np.asarray(product), left @ right)


def many(mesh, count):
    """A program of so many sums that do not depend on each other."""
    def sums(x):
        return jnp.stack([lax.psum(x * (i + 1), "x") for i in range(count)])
    return jax.jit(shard_map(sums, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x")))


def check_independent_collectives():
    """48 in one program, two programs in flight, and programs of several threads, which all ranks start alike."""
    mesh = hvd.mesh("x")
    values = np.arange(SIZE * 1.0)
    given = spread(mesh, values)
    program, other = many(mesh, 48), many(mesh, 7)
    expected = values.sum() * np.arange(1, 49)
    for _ in range(40 * TURNS):
        first, second = program(given), other(given)
        np.testing.assert_allclose(np.asarray(first.addressable_shards[0].data)[:, 0], expected)
        np.testing.assert_allclose(np.asarray(second.addressable_shards[0].data)[:, 0], expected[:7])
    failures = []

    def run(turn):
        try:
            np.testing.assert_allclose(np.asarray(program(given).addressable_shards[0].data)[:, 0], expected)
        except Exception as error:
            failures.append((turn, error))

    for turn in range(10 * TURNS):
        thread = threading.Thread(target=run, args=(turn,))
        thread.start()
        thread.join()
    assert not failures, failures


def check_objects_and_parameters():
    assert hvd.allgather_object({"rank": RANK}) == [{"rank": rank} for rank in range(SIZE)]
    assert hvd.broadcast_object(("from", RANK), SIZE - 1) == ("from", SIZE - 1)
    tree = {"dense": {"kernel": jnp.full((2, 3), RANK, jnp.bfloat16), "bias": np.full(3, RANK)}, "steps": RANK,
            "key": jax.random.key(RANK), "complex": jnp.full(2, RANK * 1j)}
    got = hvd.broadcast_parameters(tree, SIZE - 1)
    assert got["dense"]["kernel"].dtype == jnp.bfloat16 and (got["dense"]["kernel"] == SIZE - 1).all()
    assert isinstance(got["dense"]["bias"], np.ndarray) and got["dense"]["bias"].tolist() == [SIZE - 1] * 3
    assert got["steps"] == SIZE - 1 and (got["complex"] == (SIZE - 1) * 1j).all()
    assert (jax.random.key_data(got["key"]) == jax.random.key_data(jax.random.key(SIZE - 1))).all()
    assert jax.process_index() == RANK and jax.process_count() == SIZE == len(jax.devices())
    assert 0 <= hvd.local_rank() < SIZE
    if SIZE > 1:
        try:
            hvd.broadcast_parameters({"w": jnp.ones(2 + (RANK == 1))})
        except hvd.HorovodInternalError as error:
            assert "jax.parameters['w']': ranks disagree on shape" in str(error), error
        else:
            raise AssertionError("shapes differ")


def check_examples_of_docstrings():
    import doctest

    import lightcc
    from lightcc.jax import meshes, processes, trees
    for module in (hvd, meshes, processes, trees):
        given = {"lightcc": lightcc, "jax": jax}
        for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=given):
            if example.name.endswith(".shutdown"):
                continue  # the last of a program
            report = []
            doctest.DocTestRunner(verbose=False).run(example, out=report.append)
            assert not report, "".join(report)


if __name__ == "__main__":
    for name, check in [*globals().items()]:
        if name.startswith("check_"):
            check()
            print(f"{name} done", flush=True)
