"""A mesh of all devices."""
import jax
import numpy as np


def mesh(axis: str = "ranks") -> jax.sharding.Mesh:
    """A mesh of the devices of all processes, in the order of their ranks, with one axis of that name.

    >>> lightcc.jax.mesh("batch").axis_names
    ('batch',)
    """
    return jax.sharding.Mesh(np.array(jax.devices()), (axis,))
