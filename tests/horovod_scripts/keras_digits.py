"""A net learns handwritten digits: a Keras script for Horovod, in the way that Horovod's documentation shows.

    horovodrun -np 2 python keras_digits.py
"""
import argparse
import hashlib
import os

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="Keras digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--warmup-epochs", type=int, default=2)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--backward-passes-per-step", type=int, default=1)
parser.add_argument("--checkpoint-format", default="", help="where rank 0 saves the model after each epoch")
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

# If set > 0, will resume training from a given checkpoint.
resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if args.checkpoint_format and os.path.exists(args.checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break

# Horovod: broadcast resume_from_epoch from rank 0 (which will have checkpoints) to other ranks.
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))

tf.random.set_seed(args.seed + hvd.rank())
digits = load_digits()
images, labels = (digits.images[..., tf.newaxis] / 16).astype("float32"), digits.target.astype("int64")

# Horovod: each worker reads its own part of the data.
dataset = tf.data.Dataset.from_tensor_slices((images[:-300], labels[:-300])).shard(hvd.size(), hvd.rank())
dataset = dataset.shuffle(2000, seed=args.seed).batch(args.batch_size, drop_remainder=True).repeat()

# Horovod: adjust learning rate based on number of GPUs.
scaled_lr = args.lr * hvd.size()

# Restore from a previous checkpoint, if resume_from_epoch is set.
# Horovod: restore on the first worker which will broadcast both model and optimizer weights to other workers.
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(args.checkpoint_format.format(epoch=resume_from_epoch))
else:
    model = tf.keras.Sequential([
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ])

    # Horovod: add Horovod DistributedOptimizer.
    opt = hvd.DistributedOptimizer(tf.optimizers.Adam(scaled_lr), average_aggregated_gradients=True,
                                   backward_passes_per_step=args.backward_passes_per_step)
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),

    # Horovod: average metrics among workers at the end of every epoch.
    # Note: this callback must be in the list before ReduceLROnPlateau, TensorBoard or other metrics-based callbacks.
    hvd.callbacks.MetricAverageCallback(),

    # Horovod: using `lr = 1.0 * hvd.size()` from the very beginning leads to worse final accuracy. Scale the learning
    # rate `lr = 1.0` ---> `lr = 1.0 * hvd.size()` during the first epochs.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs, verbose=1),

    # Horovod: after the warmup reduce learning rate by 10 on the 5th epoch.
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=1.0, start_epoch=args.warmup_epochs,
                                               end_epoch=4),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=1e-1, start_epoch=4),
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if args.checkpoint_format and hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint(args.checkpoint_format))

# Horovod: write logs on worker 0.
verbose = 2 if hvd.rank() == 0 else 0

# Train the model. Horovod: adjust number of steps based on number of GPUs.
history = model.fit(dataset, steps_per_epoch=1497 // hvd.size() // args.batch_size, callbacks=callbacks,
                    epochs=args.epochs, initial_epoch=resume_from_epoch, verbose=verbose)

# Horovod: average the score over all workers.
score = hvd.allreduce(model.evaluate(images[-300:], labels[-300:], verbose=0)[1], name="score")
if verbose:
    print(f"Trained epochs {resume_from_epoch + 1} to {args.epochs}")
    print("Losses:", *(f"{value:.6f}" for value in history.history["loss"]))
    print(f"Test accuracy: {100 * float(score):.2f}%")

state = hashlib.sha1(b"".join(weight.tobytes() for weight in model.get_weights()))
print(f"Rank {hvd.rank()} of {hvd.size()} parameters: {state.hexdigest()}")
