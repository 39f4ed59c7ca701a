"""Embeddings by any id for Keras: what lightcc.keras.embedding and lightcc.tensorflow.keras.embedding share."""
