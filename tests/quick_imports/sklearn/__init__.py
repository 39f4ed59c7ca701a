"""Stands before scikit-learn in programs that tests start: its import takes longer than their training, and Keras makes
it too. All they need of it are two of its data sets."""
