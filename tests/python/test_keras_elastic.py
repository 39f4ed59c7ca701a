"""KerasState and the callbacks of elastic training, in one world: what a commit keeps, what restore gives back, what
sync makes equal, and how long an epoch is that was begun before; for the Keras that is installed."""
import numpy as np
import pytest
from kerases import BATCH, HAS_TF_KERAS, Kit
from nodes import begin, end

import ranks
from lightcc._keras import values
from lightcc.core.elastic_state import HostsUpdatedInterrupt, HostUpdateResult

pytestmark = pytest.mark.usefixtures("job")
STEPS = 3  # of an epoch of Kit's data


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.skipif(not HAS_TF_KERAS, reason="without tf_keras, tf.keras is what it is")
def test_with_tf_keras():
    ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


def optimizers(kit):
    """Of each family, with momentum and without."""
    return [make for family in kit.families
            for make in (lambda family=family: family.SGD(0.05, momentum=0.9), lambda family=family: family.Adam(0.01))]


def facts(state):
    return values.read(state.backend, state.own_variables())


def expect(state, before):
    now = facts(state)
    assert len(now) == len(before)
    for mine, theirs in zip(now, before):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("distributed", [True, False])
def check_restore_gives_back_what_was_committed(kit, distributed):
    for make in optimizers(kit):
        model = kit.model(kit.distributed(make()) if distributed else make())
        state = kit.hvd.elastic.KerasState(model, batch=0, log=[])
        first = facts(state)
        kit.fit_mine(model)
        state.batch, state.log = 3, ["a"]
        state.restore()
        expect(state, first)
        assert (state.batch, state.log) == (0, [])
        kit.fit_mine(model)
        state.batch = 3
        state.commit()
        second, afterwards = facts(state), []
        for _ in range(2):  # restored, trained on, and restored again from the same commit
            kit.fit_mine(model)
            afterwards.append(facts(state))
            model.optimizer.learning_rate = 0.5
            state.batch, state.log = 9, ["b"]
            state.restore()
            expect(state, second)
            assert (state.batch, state.log) == (3, [])
        for one, other in zip(*afterwards):
            np.testing.assert_array_equal(one, other)


def check_sync_makes_all_equal_to_rank_0(kit):
    for make in optimizers(kit):
        model = kit.model(make())  # a plain optimizer: ranks go apart
        model.set_weights([weight + kit.hvd.rank() for weight in model.get_weights()])
        kit.fit_mine(model, epochs=1)
        state = kit.hvd.elastic.KerasState(model, rank=kit.hvd.rank())
        before = facts(state)
        state.sync()
        if kit.hvd.rank() == 0:
            expect(state, before)
        assert state.rank == 0
        synced = facts(state)
        for array in synced:
            np.testing.assert_array_equal(kit.value(kit.hvd.allreduce(np.float64(array))), np.float64(array))
        kit.fit_mine(model)
        state.restore()
        expect(state, synced)


def check_sync_of_ranks_that_differ(kit):
    state = kit.hvd.elastic.KerasState(kit.model(kit.keras.optimizers.SGD(0.1), hidden=5 + kit.hvd.rank()))
    if kit.hvd.size() == 1:
        return state.sync()
    with pytest.raises(ValueError, match="KerasState: the ranks' variables differ: number 0 is float32 of shape"):
        state.sync()


def check_a_model_that_is_not_built(kit):
    model = kit.keras.Sequential([kit.keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="KerasState: the model is not built"):
        kit.hvd.elastic.KerasState(model)


def check_an_optimizer_beside_the_model(kit):
    model, optimizer = kit.uncompiled(), kit.keras.optimizers.Adam(0.1)
    state = kit.hvd.elastic.KerasState(model, optimizer)
    before = facts(state)
    assert len(before) > 2 * len(model.weights)
    kit.apply(optimizer, [(np.ones(weight.shape), weight) for weight in model.trainable_weights])
    state.restore()
    expect(state, before)
    assert len(facts(kit.hvd.elastic.KerasState(kit.uncompiled()))) == 4  # none at all


def check_an_optimizer_makes_no_variables_after_the_state(kit):
    """Else a newcomer would have fewer than the others."""
    for make in optimizers(kit):
        optimizer = make()
        float(kit.value(optimizer.learning_rate))  # which legacy optimizers take for being built
        model = kit.model(optimizer)
        state = kit.hvd.elastic.KerasState(model)
        count = len(facts(state))
        kit.fit_mine(model)
        assert len(facts(state)) == count


def check_a_model_that_is_compiled_again(kit):
    model = kit.model(kit.keras.optimizers.SGD(0.1))
    state = kit.hvd.elastic.KerasState(model)
    model.compile(kit.keras.optimizers.Adam(0.1), kit.keras.losses.MeanSquaredError())
    state.commit()
    before = facts(state)
    kit.fit_mine(model)
    state.restore()
    expect(state, before)
    assert len(before) > 2 * len(model.weights)


def check_the_loss_scale_is_that_of_rank_0(kit):
    scaled = (kit.keras.optimizers if kit.is_3 else kit.keras.mixed_precision).LossScaleOptimizer
    for family in kit.families:
        inner = family.SGD(0.1)
        optimizer = scaled(inner, initial_scale=2.0 ** (10 + kit.hvd.rank()))
        state = kit.hvd.elastic.KerasState(kit.uncompiled(), optimizer)
        state.sync()
        assert float(kit.value(optimizer.dynamic_scale if kit.is_3 else optimizer.loss_scale)) == 2.0 ** 10
        state.restore()


def check_compressed_gradients_of_a_process_set(kit):
    """Who is not in it shares nothing."""
    alone = kit.hvd.global_process_set if kit.hvd.size() == 1 else kit.hvd.add_process_set([0])
    optimizer = kit.distributed(compression=kit.hvd.Compression.topk(0.1), process_set=alone)
    state = kit.hvd.elastic.KerasState(kit.uncompiled(), optimizer)
    state.sync()
    if kit.hvd.size() > 1:
        kit.hvd.remove_process_set(alone)


def check_sums_of_several_passes_belong_to_a_world(kit):
    """What a worker that is lost, or left, has added up is not added to what others begin with."""
    variable = kit.variable(np.zeros(2))
    model = kit.uncompiled()
    for leave in ("restore", "on_reset"):
        optimizer = kit.distributed(backward_passes_per_step=2, op=kit.hvd.Sum)
        kit.build(optimizer, [variable])
        state = kit.hvd.elastic.KerasState(model, optimizer)
        variable.assign(np.zeros(2, np.float32))
        for gradient in (4.0, 1.0, 2.0):
            kit.apply(optimizer, [([gradient] * 2, variable)])
            if gradient == 4.0:
                getattr(state, leave)()
        np.testing.assert_allclose(kit.value(variable), -3.0 * kit.hvd.size())


def check_what_compression_has_left_behind_is_committed(kit, job):
    begin()
    try:
        optimizer = kit.distributed(kit.keras.optimizers.SGD(1.0), op=kit.hvd.Sum,
                                    compression=kit.hvd.Compression.topk(0.1))
        model = kit.model(optimizer, hidden=1 << 12)
        state = kit.hvd.elastic.KerasState(model)
        kit.fit_mine(model)
        state.commit()

        def left():
            saved = kit.hvd.compression_state(optimizer)
            return saved and {name: [piece["values"].copy() for piece in tensor["pieces"]]
                              for name, tensor in saved["tensors"].items()}

        committed = left()
        assert kit.hvd.size() == 1 or any(piece.any() for pieces in committed.values() for piece in pieces)
        kit.fit_mine(model)
        state.restore()
        np.testing.assert_equal(left(), committed)
        state.sync()  # shares what all have left, and commits it
        shared = left()
        kit.fit_mine(model)
        state.restore()
        np.testing.assert_equal(left(), shared)
    finally:
        end()
        job.init()


# Callbacks

class Resumed:
    """Fits with the callbacks of elastic training, from a batch of an epoch on."""

    def __init__(self, kit, **given):
        self.kit, keras, elastic = kit, kit.keras, kit.hvd.elastic
        self.model = kit.model(kit.keras.optimizers.SGD(0.0))
        self.state = state = elastic.KerasState(self.model, **given)
        self.batches, self.commits = [], []
        resumed, commit = self, state.commit

        class Recorder(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                resumed.batches.append((resumed.epoch, batch))

            def on_epoch_begin(self, epoch, logs=None):
                resumed.epoch = epoch

        def recorded():
            self.commits.append((state.epoch, state.batch))
            commit()

        state.commit = recorded
        self.recorder = Recorder()
        self.updates = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state)]

    def fit(self, *more, commit=None, **options):
        callbacks = [*self.updates, *more, self.recorder, *([commit] if commit else [])]
        x, y = map(self.kit.my_part, self.kit.data(STEPS))
        batch = BATCH // self.kit.hvd.size()
        data = {"x": x, "y": y, "batch_size": batch, "shuffle": False}
        if options.pop("by_batches", False):
            data = {"x": batches_of(self.kit, x, y, batch)}
        return self.model.fit(**data, verbose=0, callbacks=callbacks, **options)


def batches_of(kit, x, y, size):
    """Data of Keras' own kind, which want to hear of the ends of epochs."""
    class Batches(kit.keras.utils.PyDataset if kit.is_3 else kit.keras.utils.Sequence):
        def __len__(self):
            return len(x) // size

        def __getitem__(self, i):
            return x[i * size:(i + 1) * size], y[i * size:(i + 1) * size]

    return Batches()


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": STEPS}, {"by_batches": True}], ids=str)
def check_an_epoch_that_was_begun_before_is_shorter(kit, options):
    """And the next ones are not."""
    resumed = Resumed(kit, epoch=4, batch=STEPS - 1)
    history = resumed.fit(epochs=3, **options)
    assert resumed.batches == [(0, 0), *((epoch, batch) for epoch in (1, 2) for batch in range(STEPS))]
    assert len(history.history["loss"]) == 3
    assert (resumed.state.epoch, resumed.state.batch) == (7, 0)


def check_epochs_may_be_numbered_from_where_they_go_on(kit):
    resumed = Resumed(kit, epoch=4, batch=0)
    resumed.fit(initial_epoch=4, epochs=6)
    assert len(resumed.batches) == 2 * STEPS and (resumed.state.epoch, resumed.state.batch) == (6, 0)


def check_an_epoch_has_at_least_one_batch(kit):
    resumed = Resumed(kit, epoch=0, batch=STEPS + 7)  # of a world of fewer ranks
    resumed.fit(epochs=1)
    assert resumed.batches == [(0, 0)] and (resumed.state.epoch, resumed.state.batch) == (1, 0)


def check_other_callbacks_may_end_the_training(kit):
    class Stop(kit.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    resumed = Resumed(kit, epoch=0, batch=STEPS - 1)
    resumed.fit(Stop(), epochs=3)
    assert resumed.batches == [(0, 0)]
    resumed.updates.reverse()
    resumed.fit(kit.keras.callbacks.EarlyStopping("loss", patience=0), epochs=9)  # the rate is 0: it never gets better
    assert len(resumed.batches) == 1 + 2 * STEPS


def check_validation_of_a_shorter_epoch(kit):
    resumed = Resumed(kit, epoch=0, batch=1)
    history = resumed.fit(epochs=2, validation_data=kit.data(1)).history
    assert len(history["val_loss"]) == 2 and len(resumed.batches) == 2 * STEPS - 1


def check_the_next_fit_has_its_own_validation_data(kit):
    resumed = Resumed(kit, epoch=0, batch=0)
    counted = []

    class Count(kit.keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            counted.append(batch)

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise HostsUpdatedInterrupt(False)

    with pytest.raises(HostsUpdatedInterrupt):
        resumed.fit(Count(), epochs=3, validation_data=kit.data(2), validation_batch_size=BATCH)
    resumed.state.on_reset()
    resumed.fit(Count(), epochs=1, validation_data=kit.data(1), validation_batch_size=BATCH)
    assert counted == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("each", [1, 2])
def check_commits(kit, each):
    resumed = Resumed(kit, epoch=0, batch=0)
    resumed.fit(commit=kit.hvd.elastic.CommitStateCallback(resumed.state, each), epochs=2)
    within = [(0, batch + 1) for batch in range(STEPS) if (batch + 1) % each == 0]
    assert resumed.commits == [*within, (1, 0), *((1, batch) for _, batch in within), (2, 0)]


def check_news_of_hosts_end_the_fit_behind_a_batch(kit):
    resumed = Resumed(kit, epoch=0, batch=0)

    class News(kit.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                resumed.state.on_hosts_updated(1.0, HostUpdateResult.added)

    with pytest.raises(HostsUpdatedInterrupt):
        resumed.fit(News(), commit=kit.hvd.elastic.CommitStateCallback(resumed.state), epochs=2)
    assert (resumed.state.epoch, resumed.state.batch) == (0, 2)
    resumed.state.save()
    resumed.fit(epochs=1)
    assert resumed.batches == [(0, 0), (0, 1), (0, 0)] and (resumed.state.epoch, resumed.state.batch) == (1, 0)


def check_wrong_arguments(kit):
    elastic, state = kit.hvd.elastic, kit.hvd.elastic.KerasState(kit.model("sgd"))
    with pytest.raises(ValueError, match=r"UpdateBatchStateCallback: the state has no batch: make it by KerasState\("):
        elastic.UpdateBatchStateCallback(state)
    with pytest.raises(ValueError, match="UpdateEpochStateCallback: the state has no epoch"):
        elastic.UpdateEpochStateCallback(state)
    with pytest.raises(ValueError, match="CommitStateCallback: batches_per_commit must be 1 or more, not 0"):
        elastic.CommitStateCallback(state, 0)


@pytest.fixture
def kit(job):
    return Kit()
