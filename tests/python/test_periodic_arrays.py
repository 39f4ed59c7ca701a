"""LocalSGD and DiLoCo over arrays against a plain loop over all ranks' arrays, by schedules drawn at random; and what
the wrappers of Keras and TensorFlow share."""
import random

import numpy as np
import pytest
from nodes import COMPRESSED, SHAPES, begin, end, gradient

import lightcc.numpy as hvd
import ranks
from lightcc.compress.codec import codec_of, stats
from lightcc.compress.compressors import Int8, NoneCompressor, TopK
from lightcc.core.exchange_schedule import in_fragments
from lightcc.periodic import arrays

pytestmark = [pytest.mark.usefixtures("job"), pytest.mark.torch_sizes]
VARIABLES = [(3, 2), (4,), (2, 2, 2), (1,), (5,)]


@pytest.mark.parametrize("np", (2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def moved(step, rank):
    """What a rank's own optimizer does in a step."""
    generator = np.random.default_rng([step, rank])
    return [generator.standard_normal(shape) for shape in VARIABLES]


class Held:
    """Variables that know how to be read and written."""

    def __init__(self, values):
        self.values = [value.copy() for value in values]
        self.labels = [f"variable {i}" for i in range(len(values))]

    def start(self, exchange):
        exchange.start(lambda indices: [self.values[i].copy() for i in indices], self.write, self.labels)
        exchange.before_step()
        return exchange

    def write(self, indices, values):
        for i, value in zip(indices, values):
            self.values[i] = np.array(value)  # arithmetic makes numbers of arrays without dimensions

    def move(self, step):
        """As this rank's own optimizer does."""
        for value, change in zip(self.values, moved(step, hvd.rank())):
            value += change

    def expect_equal_on_all_ranks(self):
        for value in self.values:
            every = hvd.allgather(value.reshape(1, -1))
            assert (every == every[0]).all()


def diloco(sync_every, fragments=1, delay=0, alpha=None, rate=0.7, momentum=0.9, nesterov=True,
           compression=NoneCompressor, what="test"):
    return arrays.diloco(what, sync_every, fragments, delay, alpha, rate, momentum, nesterov, compression,
                         hvd.global_process_set)


def check_equals_a_loop_by_random_schedules():
    generator = random.Random(11)
    for _ in range(30):
        sync_every = generator.randrange(1, 7)
        is_outer = generator.random() < 0.7
        fragments = generator.randrange(1, min(sync_every, len(VARIABLES)) + 1) if is_outer else 1
        delay = generator.choice([0, generator.randrange(sync_every)])
        alpha = generator.choice([None, 0.0, 0.25]) if is_outer else None
        rate, momentum, nesterov = generator.choice([(0.7, 0.9, True), (1.0, 0.0, False), (0.5, 0.5, False)])
        exchange = diloco(sync_every, fragments, delay, alpha, rate, momentum, nesterov) if is_outer else \
            arrays.local_sgd("test", sync_every, delay)
        begin_values = moved(-1 + 2**31, 0)
        held = Held(begin_values)
        held.start(exchange)
        of_ranks = [[value.copy() for value in begin_values] for _ in range(hvd.size())]
        outer, buffers = [value.copy() for value in begin_values], [np.zeros(shape) for shape in VARIABLES]
        parts = in_fragments([value.nbytes for value in begin_values], fragments)
        mixed = 0.0 if alpha is None and not delay else 0.5 if alpha is None else alpha
        sent = {}

        def take_in(fragment):
            for i, theirs in zip(parts[fragment], sent.pop(fragment)):
                mean = sum(theirs) / len(theirs)
                if not is_outer:
                    for values, own in zip(of_ranks, theirs):
                        values[i] = values[i] + mean - own if delay else mean.copy()
                    continue
                buffers[i] = momentum * buffers[i] + outer[i] - mean
                outer[i] = outer[i] - rate * (outer[i] - mean + momentum * buffers[i] if nesterov else buffers[i])
                for values in of_ranks:
                    values[i] = mixed * values[i] + (1 - mixed) * outer[i]
        for step in range(1, generator.randrange(1, 4 * sync_every) + 1):
            held.move(step)
            exchange.after_step()
            for rank, values in enumerate(of_ranks):
                for value, change in zip(values, moved(step, rank)):
                    value += change
            for fragment in range(fragments):
                due = (fragment + 1) * sync_every // fragments
                if delay and step > delay and (step - delay - due) % sync_every == 0:
                    take_in(fragment)
                if (step - due) % sync_every == 0:
                    sent[fragment] = [[values[i].copy() for values in of_ranks] for i in parts[fragment]]
                    if not delay:
                        take_in(fragment)
        for mine, expected in zip(held.values, of_ranks[hvd.rank()]):
            np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)
        exchange.now()
        held.expect_equal_on_all_ranks()


@pytest.mark.parametrize("delay", (0, 1))
@pytest.mark.parametrize("kind", ("LocalSGD", "DiLoCo"))
def check_a_variable_without_dimensions(kind, delay):
    """Becomes what one of one element becomes."""
    exchange = diloco(2, delay=delay) if kind == "DiLoCo" else arrays.local_sgd("test", 2, delay)
    held = Held([np.array(1.0), np.array([1.0])])
    held.start(exchange)
    for _ in range(5):
        for value in held.values:
            value -= 1.0 + hvd.rank()
        exchange.after_step()
        assert held.values[0].shape == () and held.values[0] == held.values[1]
    exchange.now()
    assert held.values[0] == held.values[1] < 0
    held.expect_equal_on_all_ranks()


def check_another_epoch_begins_with_what_the_first_rank_has():
    exchange = diloco(4, delay=2)
    held = Held(moved(0, 0))
    held.start(exchange)
    for step in range(5):  # the exchange of step 4 is on its way
        held.move(step)
        exchange.after_step()
    hvd.barrier()  # what is on its way is so on all ranks
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:  # a new worker
        exchange = diloco(4, delay=2)
        held = Held(moved(1, 1))
        held.start(exchange)
    else:
        exchange.before_step()
    assert exchange.steps == 5
    for _ in range(4):
        exchange.after_step()
    exchange.now()
    held.expect_equal_on_all_ranks()


def check_another_epoch_begins_with_the_variables_as_they_are():
    """An elastic job has gone back to an earlier commit."""
    exchange = diloco(2)
    held = Held(moved(0, 0))
    held.start(exchange)
    for step in range(2):
        held.move(step)
        exchange.after_step()
    hvd.shutdown()
    hvd.init()
    held.values = moved(0, 0)
    exchange.before_step()
    exchange.now()
    for value, committed in zip(held.values, moved(0, 0)):
        np.testing.assert_allclose(value, committed, rtol=1e-12)


def check_others_begin_anew():
    exchange = diloco(3, delay=2)
    held = Held(moved(0, 0))
    held.start(exchange)
    for step in range(4):  # the exchange of step 3 is on its way
        held.move(step)
        exchange.after_step()
    (handle,) = exchange._handles[0]
    exchange.forget()
    with pytest.raises(ValueError, match="unknown handle"):
        hvd.poll(handle)
    hvd.join()  # is refused no more
    others = Held([np.ones(3), np.array(2.0)])
    others.start(exchange)
    for _ in range(5):
        exchange.after_step()
    exchange.now()
    for value, first in zip(others.values, (np.ones(3), 2.0)):
        np.testing.assert_array_equal(value, first)  # nothing of the first ones' momentum


def check_others_get_nothing_that_compression_has_left_behind():
    begin(1)
    try:
        exchange = diloco(1, compression=TopK(0.05))
        for moves in (True, False):
            held = Held([np.zeros(shape, np.float32) for shape in SHAPES.values()])
            held.labels = list(SHAPES)
            held.start(exchange)
            for i, name in enumerate(SHAPES):
                held.values[i] -= moves * gradient(name, 0)
            exchange.after_step()
            assert all(value.any() == moves for value in held.values)
            exchange.forget()
    finally:
        end()
        hvd.init()


@pytest.mark.parametrize("kind", ("LocalSGD", "DiLoCo"))
def check_a_join_is_refused_before_the_end(kind):
    exchange = arrays.local_sgd("hvd.LocalSGD", 2) if kind == "LocalSGD" else diloco(2, what="hvd.DiLoCo")
    Held(moved(0, 0)).start(exchange)
    with pytest.raises(ValueError, match=f"hvd.join: hvd.{kind} averages over all ranks"):
        hvd.join()
    exchange.end()
    hvd.join()
    exchange.before_step()
    with pytest.raises(ValueError, match=f"hvd.join: hvd.{kind} averages over all ranks"):
        hvd.join()
    del exchange
    hvd.join()


@pytest.mark.parametrize("compression", (TopK(0.05), Int8()), ids=str)
def check_compression_sends_less_and_loses_little(compression):
    begin(1)
    try:
        held = Held([np.zeros(shape, np.float32) for shape in SHAPES.values()])
        held.labels = list(SHAPES)
        exchange = diloco(1, rate=1.0, momentum=0.0, nesterov=False, compression=compression)
        held.start(exchange)
        steps = 40
        total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(steps):
            for i, name in enumerate(SHAPES):
                held.values[i] = held.values[i] - gradient(name, step)
                total[name] += sum(gradient(name, step, rank) for rank in range(hvd.size())) / hvd.size()
            exchange.after_step()
        assert stats([codec_of(compression)])["ratio"] < 0.6
        for value, name in zip(held.values, SHAPES):
            left = np.abs(total[name] + value)
            if name in COMPRESSED:
                assert left.mean() < 0.5 * np.abs(total[name]).mean() + 10, "the rest is left behind for later"
            else:
                np.testing.assert_allclose(left, 0, atol=1e-3)
    finally:
        end()
        hvd.init()


def check_ranks_that_differ_and_bad_input():
    exchange = arrays.local_sgd("hvd.LocalSGD", 2 + hvd.rank() % 2)
    held = Held(moved(0, 0))
    for attempt in (lambda: held.start(exchange), exchange.before_step, exchange.now):
        with pytest.raises(ValueError, match="hvd.LocalSGD: the ranks have different settings: sync_every is 2 on"):
            attempt()
    with pytest.raises(ValueError, match="5 variables cannot be cut into 6 fragments"):
        Held(moved(0, 0)).start(diloco(8, fragments=6))
    for options, text in ({"alpha": 2}, "alpha=2"), ({"rate": -1}, "outer_learning_rate=-1"), (
            {"momentum": 1.5}, "outer_momentum=1.5"), ({"compression": object}, "compression can be topk"):
        given = {"alpha": None, "rate": 0.7, "momentum": 0.9, "compression": NoneCompressor, **options}
        with pytest.raises(ValueError, match=text):
            arrays.diloco("hvd.DiLoCo", 4, 1, 0, given["alpha"], given["rate"], given["momentum"], True,
                          given["compression"], hvd.global_process_set)
