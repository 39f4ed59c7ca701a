"""A net learns handwritten digits: a TensorFlow script for Horovod, in the way that Horovod's documentation shows.

    horovodrun -np 2 python tensorflow2_digits.py
"""
import argparse
import hashlib

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="TensorFlow 2 digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--fp16-allreduce", action="store_true", help="use fp16 compression during allreduce")
parser.add_argument("--use-adasum", action="store_true", help="use the Adasum algorithm to do reduction")
parser.add_argument("--checkpoint-dir", default="", help="where rank 0 saves the model after training")
args = parser.parse_args()

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin GPU to be used to process local rank (one GPU per process)
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.random.set_seed(args.seed + hvd.rank())
digits = load_digits()
images, labels = (digits.images[..., tf.newaxis] / 16).astype("float32"), digits.target.astype("int64")

# Horovod: each worker reads its own part of the data.
dataset = tf.data.Dataset.from_tensor_slices((images[:-300], labels[:-300])).shard(hvd.size(), hvd.rank())
dataset = dataset.shuffle(2000, seed=args.seed).batch(args.batch_size, drop_remainder=True).repeat()
steps_per_epoch = 1497 // hvd.size() // args.batch_size

digits_model = tf.keras.Sequential([
    tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
    tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
    tf.keras.layers.Dropout(0.1),
    tf.keras.layers.Flatten(),
    tf.keras.layers.Dense(64, activation="relu"),
    tf.keras.layers.Dense(10, activation="softmax"),
])
loss = tf.losses.SparseCategoricalCrossentropy()

# Horovod: adjust learning rate based on number of GPUs.
opt = tf.optimizers.Adam(args.lr * (1 if args.use_adasum else hvd.size()))

checkpoint = tf.train.Checkpoint(model=digits_model, optimizer=opt)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = digits_model(images, training=True)
        loss_value = loss(labels, probs)

    # Horovod: add Horovod Distributed GradientTape.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    tape = hvd.DistributedGradientTape(tape, compression=compression,
                                       op=hvd.Adasum if args.use_adasum else hvd.Average)

    grads = tape.gradient(loss_value, digits_model.trainable_variables)
    opt.apply_gradients(zip(grads, digits_model.trainable_variables))

    # Horovod: broadcast initial variable states from rank 0 to all other processes. Note: broadcast should be done
    # after the first gradient step to ensure optimizer initialization.
    if first_batch:
        hvd.broadcast_variables(digits_model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)

    return loss_value


# Horovod: adjust number of steps based on number of GPUs.
for batch, (batch_images, batch_labels) in enumerate(dataset.take(args.epochs * steps_per_epoch)):
    loss_value = training_step(batch_images, batch_labels, batch == 0)
    if (batch + 1) % steps_per_epoch == 0:
        # Horovod: average the loss of all workers.
        mean = hvd.allreduce(loss_value, name="loss")
        if hvd.rank() == 0:
            print(f"Step #{batch + 1}\tLoss: {mean:.6f}")

accuracy = tf.reduce_mean(tf.cast(tf.argmax(digits_model(images[-300:]), 1) == labels[-300:], tf.float32))
every = hvd.allgather_object(float(accuracy), name="accuracy")
if hvd.rank() == 0:
    print(f"Test accuracy: {100 * sum(every) / len(every):.2f}%")

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting it.
if args.checkpoint_dir and hvd.rank() == 0:
    checkpoint.save(args.checkpoint_dir + "/digits")

state = hashlib.sha1(b"".join(v.numpy().tobytes() for v in digits_model.trainable_variables))
print(f"Rank {hvd.rank()} of {hvd.size()} parameters: {state.hexdigest()}")
