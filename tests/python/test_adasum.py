"""Adasum: allreduce in every form against the definition."""
import copy

import numpy as np
import pytest
from cases import FLOATS, FRAMEWORKS, INTEGERS, TOLERANCE, Case

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.sizes]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# The oracle

def two(a, b):
    ab, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    return (1 - ab / (2 * aa) if aa else 1) * a + (1 - ab / (2 * bb) if bb else 1) * b


def adasum(parts):
    """Pairs of neighbours, pairs of pairs; first as many pairs as there are ranks beyond a power of two."""
    parts = [np.asarray(part, np.float64) for part in parts]
    power = 1 << (len(parts).bit_length() - 1)
    extras = len(parts) - power
    parts = [two(parts[2 * i], parts[2 * i + 1]) for i in range(extras)] + parts[2 * extras:]
    while len(parts) > 1:
        parts = [two(a, b) for a, b in zip(parts[::2], parts[1::2])]
    return parts[0]


SHAPES = [(), (0,), (1,), (5, 3), (1031,), (70_001,)]


def numbers(shape, rank):
    """What the ranks have is half alike; rank 2 has nothing in one-dimensional tensors."""
    def normal(seed):
        return np.random.default_rng(seed).standard_normal(shape)
    return (normal(1) + normal(10 + rank)) * (not (rank == 2 and len(shape) == 1))


@pytest.fixture(params=[(name, dtype) for name, framework in FRAMEWORKS.items() for dtype in FLOATS
                        if dtype in framework.dtypes], ids="-".join)
def case(request, job):
    return Case(FRAMEWORKS[request.param[0]](), request.param[1])


def all_rounded(case, shape, who=None):
    """What every rank has, as it is in the dtype."""
    who = range(case.hvd.size()) if who is None else who
    return [case.framework.values(case.tensor(numbers(shape, rank))) for rank in who]


def expect_near(case, tensor, values):
    assert case.framework.dtype(tensor) == case.dtype
    got = case.framework.values(tensor)
    assert got.shape == np.shape(values)
    room = 8 * TOLERANCE[case.dtype] * max(np.abs(values).max(initial=0), 1)
    np.testing.assert_allclose(got, values, rtol=0, atol=room)


# Allreduce

def check_all_forms(case):
    hvd, framework = case.hvd, case.framework
    inputs = [case.tensor(numbers(shape, hvd.rank())) for shape in SHAPES]
    outputs = [adasum(all_rounded(case, shape)) for shape in SHAPES]
    for run in (*framework.forms("allreduce"), *framework.forms("allreduce", in_place=True)):
        results = run([copy.deepcopy(x) for x in inputs], op=hvd.Adasum)
        for result, values in zip(results, outputs):
            expect_near(case, result, values)
    for result in results[2:]:
        framework.expect_identical(result)


def check_factors(case):
    x = case.tensor(numbers((37,), case.hvd.rank()))
    values = adasum(all_rounded(case, (37,)))
    for before, after in ((0.5, 1.0), (1.0, 0.25), (0.5, 4.0)):
        result = case.hvd.allreduce(x, op=case.hvd.Adasum, prescale_factor=before, postscale_factor=after)
        expect_near(case, result, values * before * after)


def check_a_burst_of_tensors_each_for_itself(case):
    """They travel together; one of them is NaN on one rank, which the others must not feel."""
    hvd, count = case.hvd, 60
    shapes = [(1 + 17 * i % 301,) for i in range(count)]
    inputs = [numbers(shape, hvd.rank()) * (i + 1) for i, shape in enumerate(shapes)]
    if hvd.rank() == 0:
        inputs[count // 2][0] = float("nan")
    results = case.framework.together("allreduce")([case.tensor(values) for values in inputs], op=hvd.Adasum)
    for i, (result, shape) in enumerate(zip(results, shapes)):
        if i == count // 2:
            # Alone, nothing is combined.
            assert np.isnan(case.framework.values(result)).sum() in ((1,) if hvd.size() == 1 else (shape[0],))
            continue
        parts = [case.framework.values(case.tensor(numbers(shape, rank) * (i + 1))) for rank in range(hvd.size())]
        got, values = case.framework.values(result), adasum(parts)
        np.testing.assert_allclose(got, values, rtol=0, atol=8 * TOLERANCE[case.dtype] * max(np.abs(values).max(), 1))


def check_group_of_several_dtypes(framework):
    hvd = framework.hvd
    dtypes = [dtype for dtype in ("float32", "float64", "bfloat16", "float16", "float32") if dtype in framework.dtypes]
    cases = [Case(framework, dtype) for dtype in dtypes]
    results = hvd.grouped_allreduce([case.tensor(numbers((9,), hvd.rank())) for case in cases], op=hvd.Adasum)
    for case, result in zip(cases, results):
        expect_near(case, result, adasum(all_rounded(case, (9,))))


def check_equal_tensors_stay_and_orthogonal_ones_add_up(framework):
    hvd = framework.hvd
    x = framework.tensor(numbers((1000,), 0), "float32")
    assert (framework.values(hvd.allreduce(x, op=hvd.Adasum)) == framework.values(x)).all()
    mine, expected = np.zeros((2, 1000))
    mine[hvd.rank()] = 3
    expected[:hvd.size()] = 3
    framework.expect(hvd.allreduce(framework.tensor(mine, "float32"), op=hvd.Adasum), expected, "float32")
    zeros = framework.tensor(np.zeros(1000), "float32")
    framework.expect(hvd.allreduce(zeros, op=hvd.Adasum), np.zeros(1000), "float32")


def check_process_sets(case):
    hvd = case.hvd
    if hvd.size() < 3:
        return
    for members in ([0, hvd.size() - 1], list(range(1, hvd.size()))):
        process_set = hvd.add_process_set(members)
        if process_set.included():
            x = case.tensor(numbers((300,), hvd.rank()))
            got = case.framework.values(hvd.allreduce(x, op=hvd.Adasum, process_set=process_set))
            values = adasum(all_rounded(case, (300,), members))
            np.testing.assert_allclose(got, values, rtol=0,
                                       atol=8 * TOLERANCE[case.dtype] * max(np.abs(values).max(), 1))
        hvd.remove_process_set(process_set)


@pytest.mark.parametrize("dtype", INTEGERS + ("bool",))
def check_a_dtype_without_fractions_is_this_ranks_error(framework, dtype):
    hvd = framework.hvd
    x = framework.tensor([1, 2], dtype)
    if hvd.rank() == 0:
        for run in framework.forms("allreduce"):
            with pytest.raises(framework.invalid, match=f"rank 0: Adasum combines .*not {dtype}"):
                run([x], op=hvd.Adasum)
        with pytest.raises(framework.invalid, match=f"rank 0: Adasum combines .*not {dtype}"):
            hvd.grouped_allreduce([framework.tensor([1.0], "float32"), x], op=hvd.Adasum)
    framework.expect(hvd.allreduce(framework.tensor([2.0], "float32"), op=hvd.Adasum), [2.0], "float32")


def check_ranks_that_disagree_hear_of_it(framework):
    hvd = framework.hvd
    if hvd.size() > 1:
        with pytest.raises(framework.refused, match="ranks disagree on reduce op.*adasum"):
            hvd.allreduce(framework.tensor(np.ones(3), "float32"), op=hvd.Adasum if hvd.rank() else hvd.Sum,
                          name="quarrel")
