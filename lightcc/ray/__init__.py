"""Ray places the ranks, and lightcc lets them meet: horovod.ray's names, and lightcc.ray.train for Ray Train."""
try:
    import ray  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError("lightcc.ray needs Ray: pip install 'ray[default]', for Ray Train 'ray[train]'",
                              name="ray") from error

from lightcc.ray import ray_logger
from lightcc.ray.elastic import ElasticRayExecutor, RayHostDiscovery
from lightcc.ray.executor import RayExecutor
from lightcc.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "ray_logger"]
