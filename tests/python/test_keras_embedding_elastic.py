"""Models with tables in elastic jobs of Keras and TensorFlow: ranks come, leave and are killed, and the rows are those
of a run that nothing has disturbed; for the Keras that is installed, and for tf_keras. And ranks that serve the others.

The Keras worker trains by fit. Its state has a ledger of what each rank trained in each step; at the end a twin of the
model trains the same batches, unbroken. The TensorFlow worker counts: a row of `counts` holds how often its sample was
trained.
"""
import json
import logging
import re

import dying_workers
import elastic_worlds
import numpy as np
import pytest
import tensorflow as tf
from dying_workers import Worker, result_of
from kerases import HAS_TF_KERAS, Kit

import ranks
from lightcc.core import elastic_worker, objects
from lightcc.embedding.rows import slices

pytestmark = [pytest.mark.newest_tensorflow, pytest.mark.long]
SAMPLES, EPOCHS, BATCH, DIM = 48, 2, 2, 3
PLAIN = {**dying_workers.OPTIONS, "how": "fit", "where": ["step"], "every": 0, "rows": 0, "folder": ""}


def prepare():
    """Before workers are forked: the imports, and nothing that starts threads of TensorFlow."""
    import lightcc.tensorflow.embedding  # noqa: F401
    assert Kit().embedding


class Job(Worker):
    """One worker. A subclass has a state, and train(state)."""

    FIRST_STEP, MOST_STEPS = 1, 2

    def begin(self, state):
        super().begin(state)
        self.shards = state._shared[0].shards
        for method in ("check_host_updates", "save", "sync"):
            self.wrap(state, method)
        elastic_worker.leaving_ranks = lambda: [
            self.worlds.members.index(me) for me in self.worlds.lost] if self.where() == "leave" else []

    def samples(self):
        """Those of this rank that are left of the epoch; some twice, so that all ranks have equally many."""
        order = np.random.default_rng(self.state.epoch).permutation(SAMPLES).tolist()
        left = [sample for sample in order if sample not in set(self.state.done)]
        padded = left + left[:-len(left) % self.kit.hvd.size()]
        return padded[self.kit.hvd.rank()::self.kit.hvd.size()]

    def trained(self, ids):
        """A step was made: what the state shall know of it before the commit."""
        every = objects.allgather_object(ids)
        self.state.ledger = [*self.state.ledger, every]
        self.state.done = [*self.state.done, *(sample for part in every for sample in part)]
        self.state.steps += 1
        self.announce()

    def recovery(self, E):
        return {"recovery": E.Recovery(self.options["folder"], every=self.options["every"])
                } if self.options["every"] else {}


class KerasJob(Job):
    """With KerasState, by fit."""

    def __init__(self, worlds, options):
        super().__init__(worlds, options)
        self.kit = kit = Kit()
        self.E = kit.embedding
        self.model, self.twin = self.model_of("rows"), None
        self.auc = self.E.DecayedAUC(1e9, 64).decayed
        self.begin(kit.hvd.elastic.KerasState(self.model, steps=0, epoch=0, done=[], ledger=[], auc=self.auc,
                                              **self.recovery(self.E)))
        self.callbacks = [self.callback(), kit.hvd.elastic.CommitStateCallback(self.state)]

    def model_of(self, name):
        keras, E = self.kit.keras, self.E
        ids = keras.Input((1,), dtype="int64")
        rows = keras.layers.Flatten()(E.Embedding(DIM, name=name, init=E.Constant(0.5))(ids))
        start = keras.initializers.Constant(-1e6 if self.worlds.number and name == "rows" else 0.25)
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer=start)(rows))
        dense = self.kit.hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5))
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)  # by iterations, which must go back, too
        model.compile(E.Optimizer(dense=dense, sparse=E.SparseAdam(rate)), "mse")
        return model

    def callback(self):
        job = self

        class Note(self.kit.keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                self.dying = job.dies("step")
                if self.dying:
                    dying_workers.die_soon(job.rng)

            def on_train_batch_end(self, batch, logs=None):
                if self.dying:
                    elastic_worlds.die()
                ids = job.mine[batch * BATCH:(batch + 1) * BATCH]
                job.auc.update([0.5] * len(ids), [1] * len(ids))
                job.trained(ids)
        return Note()

    def train(self, state):
        while state.epoch < EPOCHS:
            self.mine = self.samples()
            if self.mine:
                fit(self.model, self.mine, callbacks=self.callbacks)
            state.epoch, state.done = state.epoch + 1, []
            state.commit()

    def end(self):
        """The twin is made of what the ledger says. Prints the result."""
        hvd, twin = self.kit.hvd, self.model_of("twin")
        for step in self.state.ledger:
            fit(twin, step[hvd.rank()])
        for mine, theirs in zip(self.model.get_weights(), twin.get_weights()):
            assert mine.tobytes() == theirs.tobytes(), "the dense part is of other steps"
        got, expected = (columns_of(self.E.tables(model)[0]) for model in (self.model, twin))
        assert got == expected and len(got) == SAMPLES, "rows or their slots are of other steps"
        assert int(self.model.optimizer.iterations) == len(self.state.ledger)
        counted = sum(objects.allgather_object(float(self.auc.state_dict()["counts"].sum())))
        print("result", json.dumps([self.state.ledger, round(counted, 2), self.worlds.number]))


class TensorFlowJob(Job):
    """With TensorFlowState, by a tf.function."""

    def __init__(self, worlds, options):
        import lightcc.tensorflow as hvd
        from lightcc.tensorflow import embedding as E
        super().__init__(worlds, options)
        self.kit, self.tf = Kit(), tf
        self.counts, self.many = (E.HashEmbedding(2, name=name, init=E.Zeros()) for name in ("counts", "many"))
        self.count, self.sparse = tf.Variable(1e6 if worlds.number else 0.0), E.SGD(1.0, op=hvd.Sum)
        own = [*self.counts.trainable_variables, *self.many.trainable_variables]

        @tf.function(reduce_retracing=True)
        def step(ids, others):
            with tf.GradientTape() as tape:
                loss = -tf.reduce_sum(E.lookup([(self.counts, ids)])[0]) - tf.reduce_sum(self.many(others))
            self.sparse.apply_gradients(zip(tape.gradient(loss, own), own))
            self.count.assign_add(hvd.allreduce(tf.cast(tf.size(ids), tf.float32), op=hvd.Sum, name="samples"))
        self.step, self.moves, self.came = step, [], None
        self.begin(hvd.elastic.TensorFlowState([self.count, *own, *self.sparse.variables], steps=0, epoch=0, done=[],
                                               ledger=[], **self.recovery(E)))

    def train(self, state):
        self.note_moves()
        hvd, tf = self.kit.hvd, self.tf
        while state.epoch < EPOCHS:
            mine = self.samples()
            for first in range(0, len(mine), BATCH):
                if self.dies("step"):
                    dying_workers.die_soon(self.rng)
                ids = mine[first:first + BATCH]
                many = range(hvd.rank(), 0 if state.steps else self.options["rows"], hvd.size())
                self.step(tf.constant(ids, tf.int64), tf.constant(list(many), tf.int64))
                if self.dies("step"):
                    elastic_worlds.die()
                self.trained(ids)
                state.commit()
            state.epoch, state.done = state.epoch + 1, []
            state.commit()

    def note_moves(self):
        """How many rows have moved into this world, of how many, and of how many ranks it is."""
        now = sum(shard.came for shard in self.shards)
        mine = now - (self.came or 0), sum(len(shard.table) for shard in self.shards)
        moved, rows = zip(*objects.allgather_object(mine))
        self.came = now
        self.moves.append([sum(moved), sum(rows), self.kit.hvd.size()])

    def end(self):
        counts = {key: json.loads(row)["weight"][0] for key, row in columns_of(self.counts.table).items()}
        trained = [sample for step in self.state.ledger for part in step for sample in part]
        assert counts == {sample: trained.count(sample) for sample in trained}
        assert float(self.count) == len(trained), "the variables are of other steps"
        assert int(self.sparse.iterations) == len(self.state.ledger)
        print("moves", json.dumps(self.moves))
        print("result", json.dumps([self.state.ledger, len(trained), self.worlds.number]))


def fit(model, ids, **options):
    """One step for each BATCH."""
    x = np.array(ids, np.int64)[:, np.newaxis]
    model.fit(x, (x % 5).astype(np.float32), batch_size=BATCH, shuffle=False, verbose=0, **options)


def columns_of(table):
    """All rows with their slots, on every rank, as texts that each bit of them changes."""
    mine = {}
    for columns in slices(table, 1000):
        for number, key in enumerate(columns["key"].tolist()):
            mine[key] = json.dumps({name: column[number].tolist() for name, column in columns.items()})
    return {key: row for part in objects.allgather_object(mine) for key, row in part.items()}


def work(worlds, options):
    """Of a worker."""
    import lightcc.tensorflow as hvd
    logging.basicConfig()
    worlds.enter()
    hvd.elastic._reset = worlds.leave_and_enter
    job = (KerasJob if options["how"] == "fit" else TensorFlowJob)(worlds, options)
    try:
        hvd.elastic.run(job.train)(job.state)
    except RuntimeError as error:
        print("lost", error)
    else:
        job.end()
    hvd.shutdown()


@pytest.fixture(scope="module")
def nursery():
    with elastic_worlds.Nursery("test_keras_embedding_elastic") as nursery:
        yield nursery


def result(nursery, folder, worlds, **options):
    """The ledger of the last world, which has each sample once in each epoch, and what its workers printed."""
    texts = nursery.run(worlds, folder, {**PLAIN, "folder": str(folder / "recovery"), **options})
    ledger, counted = result_of(texts, worlds)
    trained = [sample for step in ledger for part in step for sample in part]
    padding = len(trained) - EPOCHS * SAMPLES
    assert counted == pytest.approx(len(trained), abs=0.01), "the metric has other samples"
    assert 0 <= padding <= EPOCHS * (max(map(len, worlds)) - 1)
    assert all(trained.count(sample) >= EPOCHS for sample in range(SAMPLES))
    return ledger, texts


def test_killed_ranks_take_all_back_to_the_same_step(nursery, tmp_path):
    """Five of them, each replaced by a newcomer. Rows, slots and dense weights are an unbroken run's, bit for bit."""
    worlds = [[0, 1], [0, 2], [2, 3], [3, 4], [3, 5], [5, 6]]
    ledger, texts = result(nursery, tmp_path, worlds, every=3, where=["step", "check_host_updates", "save", "sync"])
    assert re.search(r"WARNING:lightcc:the rows of rank \d of 2 .* All ranks go back to .*recovery", texts[5])
    assert {len(step) for step in ledger} == {2}


@pytest.mark.skipif(not HAS_TF_KERAS, reason="missing: tf_keras")
def test_a_killed_rank_with_tf_keras(tmp_path):
    with elastic_worlds.Nursery("test_keras_embedding_elastic", TF_USE_LEGACY_KERAS="1") as nursery:
        result(nursery, tmp_path, [[0, 1], [0, 2]], every=3)


def test_ranks_come_and_leave_with_their_rows(nursery, tmp_path):
    """And no more rows move than must: the share of those that are new, or have gone."""
    worlds = [[0, 1], [0, 1, 2], [1, 2]]
    _, texts = result(nursery, tmp_path, worlds, how="function", where=["leave"], rows=20_000)
    moves = json.loads(re.search("^moves (.*)$", texts[1], re.MULTILINE)[1])
    assert [ranks for _, _, ranks in moves] == [2, 3, 2]
    for (_, _, before), (moved, rows, after) in zip(moves, moves[1:]):
        assert rows >= 20_000
        assert 0 < moved <= 1.1 * rows * abs(after - before) / max(after, before), moves


@pytest.mark.slow
def test_fewer_ranks_go_on_from_a_checkpoint(nursery, tmp_path):
    """And then more; of a function."""
    result(nursery, tmp_path, [[0, 1, 2], [0, 2], [0, 2, 3]], how="function", every=4)


def test_a_lost_shard_ends_the_job_and_says_what_to_set(nursery, tmp_path):
    [text] = nursery.run([[0, 1], [0]], tmp_path, {**PLAIN, "how": "function"}).values()
    assert re.search(r"^lost the rows of rank 1 of 2 of table 'counts' are lost: .*TensorFlowState "
                     r"recovery=lightcc.embedding.Recovery\(path, every=steps\)", text, re.MULTILINE), text


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


if HAS_TF_KERAS:
    def test_with_tf_keras():
        ranks.run_checks(__file__, 2, TF_USE_LEGACY_KERAS="1")


# In one world

@pytest.mark.usefixtures("job")
def check_restore_takes_back_rows_the_optimizer_and_half_a_step(kit):
    import lightcc.tensorflow as hvd
    from lightcc.tensorflow import embedding as E
    user, sparse, auc = E.HashEmbedding(DIM, name="restored", init=E.Zeros()), E.SGD(1.0), E.DecayedAUC(1e9, 64)
    state = hvd.elastic.TensorFlowState([*user.trainable_variables, *sparse.variables], auc=auc, step=0)

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user(tf.constant([7])))
        return list(zip(tape.gradient(loss, user.trainable_variables), user.trainable_variables))

    sparse.apply_gradients(gradients())
    state.commit()
    sparse.apply_gradients(gradients())
    sparse.learning_rate = 0.5
    auc.update([0.5], [1])
    half = gradients()
    state.restore()
    with pytest.raises(tf.errors.FailedPreconditionError):
        sparse.apply_gradients(half)
    sparse.apply_gradients(gradients())
    assert (user(tf.constant([7]), training=False).numpy() == -2).all()
    assert int(sparse.iterations) == 2 and state.auc is auc and not auc.state_dict()["counts"].any()


# Ends of data

@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("eagerly, backwards", [(False, True), (True, False)])
def check_fit_on_ranks_with_different_numbers_of_batches(kit, eagerly, backwards):
    """As with batches whose samples weigh nothing, in place of those that a rank has not."""
    keras, hvd, E = kit.keras, kit.hvd, kit.embedding
    rank = hvd.size() - 1 - hvd.rank() if backwards else hvd.rank()
    steps, most, fits, results = 2 + 2 * rank, 2 * hvd.size(), 1 if eagerly else 2, []
    for serves in (True, False):
        layer = E.Embedding(DIM, name=f"ends.{eagerly}.{backwards}.{serves}", init=E.Constant(0.5))
        ids = keras.Input((1,), dtype="int64")
        mine = keras.layers.Flatten()(layer(ids))
        own = keras.layers.Flatten()(keras.layers.Embedding(5, DIM, embeddings_initializer="ones")(ids % 5))
        output = keras.layers.Dense(1, kernel_initializer="ones")(mine * own)
        model = keras.Model(ids, output)
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        dense = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.5))
        model.compile(E.Optimizer(dense=dense, sparse=E.SparseAdam(rate)), "mse", run_eagerly=eagerly)
        samples = np.arange(BATCH * (steps if serves else most))
        keys = (samples * 7 + 3 * rank)[:, np.newaxis]
        weights = (samples < BATCH * steps).astype(np.float32)
        if not serves:  # a sample of no weight leaves the rows of its id as they are, if others have it
            keys[BATCH * steps:] = 3 * rank
        for _ in range(fits):
            model.fit(keys, (keys % 3).astype(np.float32), sample_weight=weights, batch_size=BATCH, shuffle=False,
                      verbose=0, callbacks=[E.ServeCallback()] if serves else [])
        assert int(model.optimizer.iterations) == int(model.optimizer.sparse.iterations) == fits * most
        everywhere = objects.allgather_object([weight.tobytes() for weight in model.get_weights()])
        assert everywhere == [everywhere[0]] * hvd.size()
        trained = sorted(columns_of(layer.table))
        rows = layer(kit.tensor(trained, "int64"), training=False).numpy()  # with the steps that they have missed
        results.append([trained, rows, *model.get_weights()])
    for one, other in zip(*results):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.usefixtures("job")
def check_serve_in_a_loop_of_its_own(kit):
    import lightcc.tensorflow as hvd
    from lightcc.tensorflow import embedding as E
    user, weight, sparse = E.HashEmbedding(DIM, name="loop", init=E.Zeros()), tf.Variable(0.0), E.SGD(1.0, op=hvd.Sum)

    def dense(gradient):
        weight.assign_sub(hvd.allreduce(gradient, op=hvd.Sum, name="weight"))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(user(ids))
        sparse.apply_gradients(zip(tape.gradient(loss, user.trainable_variables), user.trainable_variables))
        dense(1.0)

    steps = [2 + 3 * rank for rank in range(hvd.size())]
    for _ in range(steps[hvd.rank()]):
        step(tf.constant([7, hvd.rank()], tf.int64))
    E.serve(lambda: dense(0.0), sparse)
    assert float(weight) == -sum(steps) and int(sparse.iterations) == max(steps)
    rows = user(tf.constant([7, *range(hvd.size())], tf.int64), training=False).numpy()[:, 0]
    assert rows.tolist() == [-sum(steps), *(-count for count in steps)]
