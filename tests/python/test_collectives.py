"""Every collective in every form: one body for all frameworks and dtypes, on one to four ranks."""
import random
import threading
import time
import warnings

import numpy as np
import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.sizes]

SHAPES = [(), (0,), (1,), (5, 3), (1031,)]
SEED = 20240607


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def reduced(case, op, parts):
    """The oracle. parts: the values of all ranks, stacked."""
    if op == "Average":
        mean = parts.sum(0) / len(parts)
        return np.trunc(mean) if case.is_integer else mean
    if op == "Product" and case.is_integer:
        return np.prod(parts.astype(np.int64), axis=0).astype(case.dtype)  # wraps around
    if not case.is_number:
        op = {"Sum": "Max", "Product": "Min"}.get(op, op)  # or, and
    return {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op](parts, axis=0)


# Allreduce

@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max", "Product"])
def check_allreduce(number, op):
    allreduce_in_all_forms(number, op)


@pytest.mark.parametrize("op", ["Sum", "Min", "Max", "Product"])
def check_allreduce_of_bool(boolean, op):
    allreduce_in_all_forms(boolean, op)


def allreduce_in_all_forms(case, op):
    hvd, how, framework = case.hvd, getattr(case.hvd, op), case.framework
    values_of = case.factors if op == "Product" else case.values
    parts = [np.stack([values_of(shape, rank) for rank in range(hvd.size())]) for shape in SHAPES]
    inputs = [part[hvd.rank()] for part in parts]
    outputs = [reduced(case, op, part) for part in parts]

    for run in framework.forms("allreduce"):
        xs = [case.tensor(values) for values in inputs]
        case.expect_all(run(xs, op=how), outputs)
        case.expect_all(xs, inputs)
    for run in framework.forms("allreduce", in_place=True):
        xs = [case.tensor(values) for values in inputs]
        results = run(xs, op=how)
        case.expect_all(results, outputs)
        assert all(result is x for result, x in zip(results, xs))


def check_default_is_average(number):
    hvd, parts = number.hvd, number.all((7,))
    number.expect(hvd.allreduce(number.mine((7,))), reduced(number, "Average", parts))
    number.expect(hvd.reducescatter(number.mine((hvd.size(),))),
                  reduced(number, "Average", number.all((hvd.size(),)))[hvd.rank():hvd.rank() + 1])


@pytest.mark.parametrize("op, before, after", [("Sum", 0.5, 3.0), ("Average", 2.0, 0.5), ("Max", 0.5, 1.0),
                                               ("Min", 1.0, 2.0)])
def check_factors(number, op, before, after):
    hvd, shape = number.hvd, (37,)
    parts = number.all(shape) * before
    if number.is_integer:  # in double, then truncated
        parts = np.trunc(parts)
    output = reduced(number, "Sum", parts) / hvd.size() if op == "Average" else reduced(number, op, parts)
    output = np.trunc(output * after) if number.is_integer else output * after
    options = {"op": getattr(hvd, op), "prescale_factor": before, "postscale_factor": after}
    for in_place in (False, True):
        for run in number.framework.forms("allreduce", in_place):
            number.expect_all(run([number.mine(shape), number.mine(shape)], **options), [output] * 2)


def check_deprecated_average(framework):
    hvd = framework.hvd
    total = np.array([2.0 * hvd.size(), sum(range(hvd.size()))])
    for average, values in ((True, total / hvd.size()), (False, total)):
        for run in (*framework.forms("allreduce"), *framework.forms("allreduce", in_place=True)):
            x = framework.tensor([2.0, hvd.rank()], "float32")
            with pytest.warns(DeprecationWarning, match="average"):
                (result,) = run([x], average=average)
            framework.expect(result, values, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        hvd.allreduce(x, op=hvd.Sum)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32"])
def check_compression(differentiable, compression, dtype):
    framework, hvd = differentiable, differentiable.hvd
    how = getattr(hvd.Compression, compression, None)
    if how is None:
        pytest.skip(f"{framework.module} has no {compression} in Horovod")
    total = hvd.size() * (hvd.size() + 1) // 2
    x = framework.tensor(np.full(9, 1 + hvd.rank()), dtype)
    for result in (hvd.allreduce(x, compression=how, op=hvd.Sum),
                   *hvd.grouped_allreduce([x, x], compression=how, op=hvd.Sum)):
        framework.expect(result, np.full(9, total), dtype)
    rows = framework.tensor(np.full((hvd.size(), 2), 1 + hvd.rank()), dtype)
    for result in (hvd.reducescatter(rows, compression=how, op=hvd.Sum),
                   *hvd.grouped_reducescatter([rows, rows], compression=how, op=hvd.Sum)):
        framework.expect(result, np.full((1, 2), total), dtype)
    if dtype != "int32" and compression != "none":  # it did travel as 16 bits
        x = framework.tensor([1.001], dtype)
        wire = framework.tensor(framework.values(x), {"fp16": "float16", "bf16": "bfloat16"}[compression])
        expected = framework.tensor(framework.values(wire), dtype)
        assert framework.values(hvd.allreduce(x, compression=how, op=hvd.Max)) == framework.values(expected)


def check_nan_and_infinity_are_not_hidden(framework):
    hvd = framework.hvd
    last = hvd.rank() == hvd.size() - 1
    for dtype in ("float16", "float32", "float64"):
        x = framework.tensor([np.nan if last else 1.0, np.inf if last else 1.0, 1.0], dtype)
        for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max):
            first, second, third = framework.values(hvd.allreduce(x, op=op))
            assert np.isnan(first) and np.isfinite(third)
            assert np.isinf(second) or op == hvd.Min


# Data movement

def check_allgather(case):
    hvd = case.hvd
    rows = [rank * 2 for rank in range(hvd.size())]  # rank 0 has none
    for rest in ((), (3,), (2, 0), (2, 5)):
        x = case.mine((rows[hvd.rank()], *rest))
        values = np.concatenate([case.values((count, *rest), rank) for rank, count in enumerate(rows)])
        for run in case.framework.forms("allgather"):
            case.expect_all(run([x, x, x]), [values] * 3)
    case.expect(hvd.allgather(case.mine((4,))), case.all((4,)).reshape(-1))


def check_broadcast(case):
    hvd = case.hvd
    for root in range(hvd.size()):
        outputs = [case.values(shape, root) for shape in SHAPES]
        for run in case.framework.forms("broadcast"):
            xs = [case.mine(shape) for shape in SHAPES]
            case.expect_all(run(xs, root), outputs)
            case.expect_all(xs, [case.values(shape, hvd.rank()) for shape in SHAPES])
        for run in case.framework.forms("broadcast", in_place=True):
            xs = [case.mine(shape) for shape in SHAPES]
            results = run(xs, root)
            assert all(result is x for result, x in zip(results, xs))
            case.expect_all(xs, outputs)


def check_alltoall_in_equal_parts(case):
    hvd = case.hvd
    for rows, rest in ((1, ()), (3, (2,)), (0, (2,))):
        shape = (rows * hvd.size(), *rest)
        part = slice(rows * hvd.rank(), rows * (hvd.rank() + 1))
        values = np.concatenate([case.values(shape, rank)[part] for rank in range(hvd.size())])
        case.expect(hvd.alltoall(case.mine(shape)), values)
        if case.framework.has_handles:
            result, received = hvd.synchronize(hvd.alltoall_async(case.mine(shape)))
            case.expect(result, values)
            case.framework.expect(received, [rows] * hvd.size(), "int32")


def check_alltoall_with_splits(case):
    hvd = case.hvd
    size, me = hvd.size(), hvd.rank()
    for rows_of, spare in ((lambda a, b: a + b, 0),          # uneven; 0 sends nothing to itself
                           (lambda a, b: 3 * (a == 0), 0),   # only 0 sends
                           (lambda a, b: 2 * (b == 0), 1),   # all to 0, and a row goes nowhere
                           (lambda a, b: 0, 2)):
        splits_of = [[rows_of(rank, to) for to in range(size)] for rank in range(size)]
        values_of = [case.values((sum(splits) + spare, 2), rank) for rank, splits in enumerate(splits_of)]
        x, splits = case.tensor(values_of[me]), splits_of[me]
        values = np.concatenate([np.split(values_of[rank], np.cumsum(splits_of[rank]))[me] for rank in range(size)])
        rows = [splits_of[rank][me] for rank in range(size)]
        for given in (splits, case.framework.tensor(splits, "int32")):
            for run in case.framework.forms("alltoall"):
                ((result, received),) = run([x], given)
                case.expect(result, values)
                case.framework.expect(received, rows, "int32")


def check_reducescatter(number):
    hvd = number.hvd
    size, me = hvd.size(), hvd.rank()
    shapes = [(0,), (1,), (size,), (2 * size + 1, 3), (5 * size - 1,), (size, 0)]

    def mine(values):
        rows = [len(values) // size + (rank < len(values) % size) for rank in range(size)]
        return values[sum(rows[:me]):sum(rows[:me + 1])]

    xs = [number.mine(shape) for shape in shapes]
    for op, factors in (*((op, {}) for op in ("Sum", "Average", "Min", "Max", "Product")),
                        ("Sum", {"prescale_factor": 2.0, "postscale_factor": 3.0})):
        outputs = [(6 if factors else 1) * mine(reduced(number, op, number.all(shape))) for shape in shapes]
        for run in number.framework.forms("reducescatter"):
            number.expect_all(run(xs, op=getattr(hvd, op), **factors), outputs)
    number.expect_all(xs, [number.values(shape, me) for shape in shapes])


def check_barrier(framework):
    hvd = framework.hvd
    for late in range(hvd.size()):
        if hvd.rank() == late:
            time.sleep(0.05)
        before = time.monotonic()
        hvd.barrier()
        after = time.monotonic()
        times = framework.values(hvd.allgather(framework.tensor([[before, after]], "float64")))
        assert times[:, 0].max() <= times[:, 1].min()


def check_mixed_dtypes_in_one_group(framework):
    hvd = framework.hvd
    dtypes = ["float32", "int64", "float32", "uint8", "float64", "int64"]
    xs = [framework.tensor(np.full(i + 1, hvd.rank() + i), dtype) for i, dtype in enumerate(dtypes)]
    results = hvd.grouped_allreduce(xs, op=hvd.Max)
    for i, (result, dtype) in enumerate(zip(results, dtypes)):
        framework.expect(result, np.full(i + 1, hvd.size() - 1 + i), dtype)


# Sizes: at the edges of what travels in one line, of vectors and of chunks; odd, and 3 MB

COUNTS = [1, 6, 11, 12, 13, 24, 25, 47, 48, 49, 1023, 16385, 65537, 786_433]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def check_sizes(framework, dtype):
    hvd = framework.hvd
    size, me = hvd.size(), hvd.rank()
    for count in COUNTS:
        def values(rank, count=count):
            return (np.arange(count) + 3 * rank) % 11
        x = framework.tensor(values(me), dtype)
        total = sum(values(rank) for rank in range(size))
        framework.expect(hvd.allreduce(x, op=hvd.Sum), total, dtype)
        framework.expect(hvd.allreduce(x, op=hvd.Max), np.max([values(rank) for rank in range(size)], 0), dtype)
        framework.expect(hvd.broadcast(x, size - 1), values(size - 1), dtype)
        framework.expect(hvd.allgather(x), np.concatenate([values(rank) for rank in range(size)]), dtype)
        framework.expect(hvd.reducescatter(x, op=hvd.Sum), np.array_split(total, size)[me], dtype)
        splits = [len(part) for part in np.array_split(np.arange(count), size)]
        parts = [np.array_split(values(rank), size)[me] for rank in range(size)]
        framework.expect(hvd.alltoall(x, splits)[0], np.concatenate(parts), dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def check_results_are_identical_in_bits(framework, dtype):
    hvd, rng = framework.hvd, np.random.default_rng(SEED + framework.hvd.rank())
    for count in COUNTS:
        x = framework.tensor(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count), dtype)
        for op in (hvd.Sum, hvd.Average, hvd.Product):
            framework.expect_identical(hvd.allreduce(x, op=op))
        for result in hvd.grouped_allreduce([x, x[:1], x]):
            framework.expect_identical(result)


# Handles and names

def check_poll_and_synchronize(handled):
    hvd = handled.hvd
    xs = [handled.tensor(np.full(50_000, hvd.rank()), "float32") for _ in range(64)]
    handles = [hvd.allreduce_async(x, op=hvd.Sum) for x in xs]
    assert len(set(handles)) == len(handles)
    seen = [hvd.poll(handle) for handle in handles]
    assert all(isinstance(done, bool) for done in seen)
    begin = time.monotonic()
    while not hvd.poll(handles[-1]):  # polling alone gets it done
        assert time.monotonic() < begin + 30
    for handle in handles:
        handled.expect(hvd.synchronize(handle), np.full(50_000, sum(range(hvd.size()))), "float32")
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="handle"):
            hvd.poll(handle)
    assert hvd.synchronize(10 ** 9) is None


def check_poll_does_not_claim_what_cannot_be(handled):
    hvd = handled.hvd
    hvd.barrier()
    if hvd.rank() > 0:  # nobody can have the result before rank 0 has begun
        handle = hvd.allreduce_async(handled.tensor([1.0], "float32"), name="late", op=hvd.Sum)
        for _ in range(1000):  # a call that waited for it would not return
            assert not hvd.poll(handle)
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(handled.tensor([1.0], "float32"), name="late", op=hvd.Sum)
    handled.expect(hvd.synchronize(handle), [hvd.size()], "float32")


def check_names_are_used_again(framework):
    hvd = framework.hvd
    for step in range(20):
        shape = (1 + step // 5,)  # also with another shape
        x = framework.tensor(np.full(shape, step + hvd.rank()), "int64")
        for name in ("one", None, framework.odd_name):
            framework.expect(hvd.allreduce(x, name=name, op=hvd.Max), np.full(shape, step + hvd.size() - 1), "int64")
        framework.expect(hvd.broadcast(x, 0, name="one"), np.full(shape, step), "int64")
        framework.expect(hvd.grouped_allreduce([x], name="one", op=hvd.Min)[0], np.full(shape, step), "int64")


def check_same_name_in_different_kinds(handled):
    hvd = handled.hvd
    x = handled.tensor([[hvd.rank()]], "float32")
    handles = [hvd.allreduce_async(x, name="x", op=hvd.Sum), hvd.allgather_async(x, name="x"),
               hvd.broadcast_async(x, 0, name="x")]
    total, every, root = [hvd.synchronize(handle) for handle in handles]
    handled.expect(total, [[sum(range(hvd.size()))]], "float32")
    handled.expect(every, [[rank] for rank in range(hvd.size())], "float32")
    handled.expect(root, [[0]], "float32")


# Many at once

def check_synchronized_in_random_order(handled):
    hvd, seed = handled.hvd, random.SystemRandom().randrange(2 ** 32)
    print("seed", seed, flush=True)
    rng = random.Random(seed)  # each rank its own
    started = []
    for i in range(100):
        x = handled.tensor(np.full((3 + i % 7, 1 + i), i + hvd.rank()), "float32")
        every = np.concatenate([np.full(x.shape, i + rank) for rank in range(hvd.size())])
        total = np.full(x.shape, sum(i + rank for rank in range(hvd.size())))
        root = i % hvd.size()
        verb, options, values = [
            (hvd.allreduce_async, {"op": hvd.Max}, np.full(x.shape, i + hvd.size() - 1)),
            (hvd.allreduce_async_, {"op": hvd.Min}, np.full(x.shape, i)),
            (hvd.allgather_async, {}, every),
            (hvd.broadcast_async, {"root_rank": root}, np.full(x.shape, i + root)),
            (hvd.reducescatter_async, {"op": hvd.Sum}, np.array_split(total, hvd.size())[hvd.rank()]),
        ][i % 5]
        started.append((verb(x, **options), values))
    rng.shuffle(started)
    for handle, values in started:
        handled.expect(hvd.synchronize(handle), values, "float32")


def check_submitted_in_another_order_on_each_rank(handled):
    hvd = handled.hvd
    order = list(range(1000))
    for repeat in range(3):  # the second and third time the requests are known
        random.Random(SEED + hvd.rank() + 10 * repeat).shuffle(order)
        handles = {i: hvd.allreduce_async(handled.tensor(np.full(1 + i % 50, i + repeat), "float32"), op=hvd.Sum,
                                          name=f"order.{i}") for i in order}
        for i in range(1000):
            handled.expect(hvd.synchronize(handles[i]), np.full(1 + i % 50, (i + repeat) * hvd.size()), "float32")


def check_from_several_threads(framework):
    hvd, failures = framework.hvd, []

    def work(thread):
        try:
            for i in range(200):
                x = framework.tensor([i, thread], "int64")
                framework.expect(hvd.allreduce(x, name=f"thread.{thread}", op=hvd.Sum),
                                 [i * hvd.size(), thread * hvd.size()], "int64")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
