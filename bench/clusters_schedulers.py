"""The schedulers of bench/clusters.py: how a job is started there, and what can be killed."""
import contextlib
import os
import sys
import tempfile
import time

from clusters_ranks import elastic, first

DEADLINE_S = 600


class Ray:
    kinds = ("rank", "node", "driver")
    DRIVER = ("import sys, cloudpickle, ray\nfrom lightcc.ray import RayExecutor\nray.init(address=sys.argv[1])\n"
              "executor = RayExecutor(None, num_workers=2)\nexecutor.start()\n"
              "executor.run(cloudpickle.load(open(sys.argv[2], 'rb')), args=(sys.argv[3],))\n")

    def __init__(self):
        self._home = tempfile.TemporaryDirectory(prefix="lightcc-", dir="/tmp")  # sockets have short paths
        os.environ["HOME"] = os.environ["RAY_TMPDIR"] = self._home.name
        import ray
        from ray.cluster_utils import Cluster
        self._ray = ray
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self._cluster.add_node(num_cpus=2)
        ray.init(address=self._cluster.address, log_to_driver=False)
        self._executor = None

    def start(self, **arguments):
        from lightcc.ray import RayExecutor
        self._executor = RayExecutor(RayExecutor.create_settings(timeout_s=DEADLINE_S,
                                                                 placement_group_timeout_s=DEADLINE_S),
                                     **(arguments or {"num_workers": 2}))
        self._executor.start()

    def run(self, function, *args):
        return self._executor.run(function, args=args)

    def end(self):
        self._executor.shutdown()

    def first(self):
        self.start()
        placed = time.time()
        done = max(when for _, when in self.run(first))
        self.end()
        return done - placed

    def elastic(self, folder):
        from lightcc.ray import ElasticRayExecutor
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, timeout_s=DEADLINE_S)
        executor = ElasticRayExecutor(settings, cpus_per_slot=2)
        executor.start()
        return lambda: executor.run(lambda: elastic(folder))

    def come(self):
        self._new = self._cluster.add_node(num_cpus=2)

    def lose(self, pids):
        self._cluster.remove_node(self._new, allow_graceful=False)

    def kill(self, kind, pids):
        """Ray counts the cores of a lost node until it has noticed."""
        node = list(self._cluster.worker_nodes)[0]
        self._cluster.remove_node(node, allow_graceful=False)
        while any(one["Alive"] for one in self._ray.nodes() if one["NodeID"] == node.node_id):
            time.sleep(0.05)

    def begin(self, kind):
        self.start(**({"num_hosts": 2} if kind == "node" else {}))

    def repair(self, kind):
        if kind == "node":
            self._cluster.add_node(num_cpus=2)

    def driver(self, folder, path):
        return [sys.executable, "-c", self.DRIVER, self._cluster.address, path, folder]

    def left(self):
        groups = self._ray.util.placement_group_table().values()
        missing = self._ray.cluster_resources().get("CPU", 0) - self._ray.available_resources().get("CPU", 0)
        return [group["state"] for group in groups if group["state"] != "REMOVED"] + ["a core"] * int(missing)

    def close(self):
        self._ray.shutdown()
        self._cluster.shutdown()


class Spark:
    kinds = ("rank", "executor", "driver")
    DRIVER = ("import sys, cloudpickle\nfrom pyspark.sql import SparkSession\nfrom lightcc.spark import run\n"
              "SparkSession.builder.master('local[2]').config('spark.ui.enabled', 'false').getOrCreate()\n"
              "run(cloudpickle.load(open(sys.argv[2], 'rb')), args=(sys.argv[3],), num_proc=2)\n")

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        os.environ.update({"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1",
                           "SPARK_WORKER_DIR": self._folder.name})
        from pyspark.sql import SparkSession
        self._session = SparkSession.builder.config("spark.ui.enabled", "false").config(
            "spark.ui.showConsoleProgress", "false").config("spark.executor.memory", "600m").config(
            "spark.log.level", "OFF").master("local-cluster[2,1,600]").getOrCreate()

    def start(self):
        pass

    def run(self, function, *args):
        import lightcc.spark
        return lightcc.spark.run(function, args=args, num_proc=2, verbose=0)

    def end(self):
        pass

    def first(self):
        said = self.run(first)
        return max(when for _, when in said) - max(began for began, _ in said)

    def elastic(self, folder):
        import lightcc.spark
        return lambda: lightcc.spark.run_elastic(elastic, args=(folder,), num_proc=2, min_num_proc=1, max_num_proc=2)

    def executors(self):
        import psutil
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                    found.append(process)
        return found

    def come(self):
        """Spark starts one again by itself."""

    def lose(self, pids):
        self.executors()[0].kill()

    def kill(self, kind, pids):
        self.executors()[0].kill()

    def begin(self, kind):
        pass

    def repair(self, kind):
        pass

    def driver(self, folder, path):
        return [sys.executable, "-c", self.DRIVER, "", path, folder]

    def left(self):
        return []

    def close(self):
        self._session.stop()
