"""Mixed precision that switches while training goes on: policies, and how ranks agree on a level. Of no framework.

lightcc.torch.amp, lightcc.tensorflow.amp and the callbacks of Keras stand on it. docs/amp.md tells how it is used.
"""
from lightcc.amp.controller import History, Switch
from lightcc.amp.policy import (
    LEVELS,
    Always,
    AnyOf,
    HoldAfterLearningRateChange,
    OnPlateau,
    OnSpike,
    Policy,
    State,
    Warmup,
)

__all__ = ["LEVELS", "Always", "AnyOf", "History", "HoldAfterLearningRateChange", "OnPlateau", "OnSpike", "Policy",
           "State", "Switch", "Warmup"]
