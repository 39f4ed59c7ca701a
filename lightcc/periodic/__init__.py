"""LocalSGD and DiLoCo over numpy arrays, for TensorFlow and Keras, whose variables are read and written between the
steps. lightcc.torch has its own, over its reducer of gradients."""
