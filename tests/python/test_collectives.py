"""Every collective in every form: one body for each framework and dtype, on one to four ranks."""
import random
import threading
import time

import numpy as np
import pytest
import ranks


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


SHAPES = [(), (0,), (1,), (5, 3), (1031,)]
OPS = ["Average", "Sum", "Min", "Max", "Product"]
SEED = 20240607


def reduced(case, op, parts):
    """The oracle: `parts` are the ranks' values, stacked."""
    if op == "Average":
        mean = parts.sum(0) / len(parts)
        return np.trunc(mean) if case.is_integer else mean
    if not case.is_number:
        op = {"Sum": "Max", "Product": "Min"}.get(op, op)  # or, and
    return {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[op](parts, axis=0)


# Allreduce

@pytest.mark.parametrize("op", OPS)
def check_allreduce(case, op):
    if not case.is_number and op == "Average":
        return check_bool_has_no_average(case)
    hvd, how = case.hvd, getattr(case.hvd, op)
    make = case.factors if op == "Product" else case.values
    inputs, expected = [], []
    for shape in SHAPES:
        inputs.append(make(shape, hvd.rank()))
        expected.append(reduced(case, op, np.stack([make(shape, rank) for rank in range(hvd.size())])))

    def expect_all(results):
        assert len(results) == len(expected)
        for result, values in zip(results, expected):
            case.expect(result, values)

    def fresh():
        return [case.tensor(values) for values in inputs]

    before = fresh()
    expect_all([hvd.allreduce(x, op=how) for x in before])
    expect_all([hvd.synchronize(h) for h in [hvd.allreduce_async(x, op=how) for x in before]])
    expect_all(hvd.grouped_allreduce(before, op=how))
    expect_all(hvd.synchronize(hvd.grouped_allreduce_async(before, op=how)))
    for x, values in zip(before, inputs):
        case.expect(x, values)  # out of place

    for run in (lambda xs: [hvd.allreduce_(x, op=how) for x in xs],
                lambda xs: [hvd.synchronize(h) for h in [hvd.allreduce_async_(x, op=how) for x in xs]],
                lambda xs: hvd.grouped_allreduce_(xs, op=how),
                lambda xs: hvd.synchronize(hvd.grouped_allreduce_async_(xs, op=how))):
        xs = fresh()
        results = run(xs)
        expect_all(results)
        assert all(result is x for result, x in zip(results, xs))


def check_bool_has_no_average(case):
    pass


def check_factors(case):
    if not case.is_number:
        return
    hvd, shape = case.hvd, (37,)
    parts = case.all(shape)
    for op, pre, post in [("Sum", 0.5, 3.0), ("Average", 2.0, 0.5), ("Max", 0.5, 1.0), ("Min", 1.0, 2.0)]:
        scaled, mean = parts * pre, hvd.size() if op == "Average" else 1
        if case.is_integer:
            scaled = np.trunc(scaled)
        expected = reduced(case, "Sum" if op == "Average" else op, scaled) * post / mean
        if case.is_integer:
            expected = np.trunc(expected)
        for result in (hvd.allreduce(case.mine(shape), op=getattr(hvd, op), prescale_factor=pre, postscale_factor=post),
                       hvd.allreduce_(case.mine(shape), op=getattr(hvd, op), prescale_factor=pre,
                                      postscale_factor=post),
                       hvd.grouped_allreduce([case.mine(shape)], op=getattr(hvd, op), prescale_factor=pre,
                                             postscale_factor=post)[0]):
            case.expect(result, expected)
