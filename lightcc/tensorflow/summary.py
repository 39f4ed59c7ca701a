"""The metrics of a rank for TensorBoard, by TensorFlow's writers."""
import tensorflow as tf

from lightcc.core import metrics


class _Scalars:
    """The writer that is the default, in the form that lightcc.core.metrics takes. tf.summary.scalar writes the same,
    where TensorBoard is installed."""

    def __init__(self):
        self._metadata = tf.compat.v1.SummaryMetadata(
            plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"))

    def add_scalar(self, tag, value, step):
        tf.summary.write(tag, tf.constant(value, tf.float32), step, self._metadata)


def write_metrics(writer, step):
    """Writes the metrics of this rank as scalars for TensorBoard, under "lightcc/<name>": lightcc.core.metrics.

    writer: what tf.summary.create_file_writer returns, or anything with add_scalar(tag, value, step). step: the number
    on the axis. Errors: ValueError before init; TypeError for another writer.

    >>> hvd.init(); hvd.write_metrics(tf.summary.create_file_writer("logs"), step=7)
    """
    if not hasattr(writer, "as_default"):
        return metrics.write_metrics(writer, step)
    with writer.as_default():
        metrics.write_metrics(_Scalars(), step)
