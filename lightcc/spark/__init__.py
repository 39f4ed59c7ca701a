"""Spark places the ranks, and lightcc lets them meet: horovod.spark.run and run_elastic, and the HorovodRunner of
Databricks."""
try:
    import pyspark  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "pyspark":
        raise
    raise ModuleNotFoundError("lightcc.spark needs PySpark: pip install pyspark pyarrow 'pandas<3', or "
                              "'pyspark[connect]' for Spark Connect", name="pyspark") from error

from lightcc.spark.elastic import run_elastic
from lightcc.spark.horovod_runner import HorovodRunner
from lightcc.spark.runner import run

__all__ = ["HorovodRunner", "run", "run_elastic"]
