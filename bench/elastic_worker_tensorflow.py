"""A worker of bench/elastic_timeline.py, as elastic_worker.py is one, with TensorFlow: a step is a tf.function with a
DistributedGradientTape."""
import sys

import tensorflow as tf
from elastic_steps import steps_for_ever

import lightcc.tensorflow as hvd

DEVICE_S = float(sys.argv[1])

tf.config.threading.set_intra_op_parallelism_threads(1)
model = tf.keras.Sequential([tf.keras.layers.Input((64,)), tf.keras.layers.Dense(256, "relu"),
                             tf.keras.layers.Dense(8)])
optimizer = tf.keras.optimizers.SGD(0.01)
optimizer.build(model.trainable_variables)
inputs, goals = tf.random.normal((32, 64)), tf.random.normal((32, 8))


@tf.function
def step(inputs, goals):
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - goals))
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))


step.get_concrete_function(inputs, goals)  # what takes time comes before init()
hvd.init()


@hvd.elastic.run
def train(state):
    steps_for_ever(state, lambda: step(inputs, goals), len(inputs), hvd, DEVICE_S)


train(hvd.elastic.TensorFlowKerasState(model, optimizer, step=0))
