"""Mixed precision that switches while training goes on: policies, and how ranks agree on a level. Of no framework.

lightcc.torch.amp, lightcc.tensorflow.amp and the callbacks of Keras stand on it. docs/amp.md tells how it is used.
"""
