"""Elastic jobs on Ray: its nodes are the hosts, with an agent each; the driver is that of lightccrun's elastic jobs."""
import signal
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import ray
from ray.util import client

from lightcc.elastic import driver, results
from lightcc.elastic.limits import Limits
from lightcc.launch import pickling
from lightcc.launch.discovery import HostDiscovery
from lightcc.launch.local import Job, pythonpath_setting
from lightcc.launch.remote import agent_line
from lightcc.launch.run_files import RunFiles


@dataclass
class ElasticSettings:
    """Of ElasticRayExecutor.create_settings, which describes them."""

    min_num_proc: int = 1
    max_num_proc: Optional[int] = None
    reset_limit: Optional[int] = None
    elastic_timeout: float = 600
    timeout_s: int = 30
    nics: Optional[Sequence[str]] = None
    cooldown_range: Optional[Tuple[float, float]] = None
    discovery: Optional[HostDiscovery] = None

    def environment(self) -> Dict[str, str]:
        found = {"HOROVOD_START_TIMEOUT": str(self.timeout_s)}
        if self.nics:
            found["LIGHTCC_IFACE"] = "=" + ",".join(self.nics)
        return found

    def limits(self) -> Limits:
        return Limits(self.min_num_proc, self.min_num_proc, self.max_num_proc, self.elastic_timeout, self.reset_limit,
                      self.cooldown_range, hosts_may_come=True)


class RayHostDiscovery(HostDiscovery):
    """Ray's living nodes, each with as many slots as its resources are enough for. Source: horovod.ray.elastic."""

    def __init__(self, use_gpu: bool = False, cpus_per_slot: int = 1, gpus_per_slot: int = 1) -> None:
        self.each = {"CPU": cpus_per_slot, **({"GPU": gpus_per_slot} if use_gpu else {})}
        self.nodes: Dict[str, str] = {}  # Ray's ids by the names that the job calls them by

    def find_available_hosts_and_slots(self) -> Dict[str, int]:
        found = {}
        for node in ray.nodes():
            name = f"{node['NodeManagerHostname']}-{node['NodeID'][:8]}"
            slots = self._slots(node["Resources"])
            if node["Alive"] and slots:
                self.nodes[name], found[name] = node["NodeID"], slots
        return found

    def _slots(self, resources: Dict[str, float]) -> int:
        return min(int(resources.get(name, 0) // amount) for name, amount in self.each.items())


class ElasticRayExecutor:
    """Runs a function on as many ranks as Ray's nodes have room for, while nodes come and go.

    settings: of create_settings(). cpus_per_slot, use_gpu, gpus_per_slot: what a rank takes; an agent reserves that for
    all ranks of its node. env_vars: of the ranks. override_discovery: False takes settings.discovery instead of Ray's
    nodes, whose names are then Ray's node ids.

    Errors: ValueError for gpus_per_slot without use_gpu. Source: horovod.ray.ElasticRayExecutor.

        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=4))
        executor.start()
        results = executor.run(train)
    """

    @staticmethod
    def create_settings(min_num_proc: int = 1, max_num_proc: Optional[int] = None, reset_limit: Optional[int] = None,
                        elastic_timeout: float = 600, timeout_s: int = 30, ssh_identity_file: Optional[str] = None,
                        nics: Optional[Sequence[str]] = None, **more: Any) -> ElasticSettings:
        """min_num_proc: slots to begin with, and fewest ranks that go on; max_num_proc: most ranks. reset_limit: most
        changes of the world. elastic_timeout: seconds for min_num_proc slots to be there. timeout_s: for an agent to
        answer. more: cooldown_range, discovery, or what has no effect here, as Ray starts the ranks."""
        return ElasticSettings(min_num_proc, max_num_proc, reset_limit, elastic_timeout, timeout_s, nics,
                               more.get("cooldown_range"), more.get("discovery"))

    def __init__(self, settings: ElasticSettings, use_gpu: bool = False, cpus_per_slot: int = 1,
                 gpus_per_slot: Optional[int] = None, env_vars: Dict[str, str] = None,
                 override_discovery: bool = True) -> None:
        if gpus_per_slot and not use_gpu:
            raise ValueError(f"ElasticRayExecutor: gpus_per_slot={gpus_per_slot} needs use_gpu=True")
        nodes = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot or 1)
        if not override_discovery and settings.discovery is None:
            raise ValueError("ElasticRayExecutor: override_discovery=False needs create_settings(discovery=...)")
        self.settings = settings if not override_discovery else replace(settings, discovery=nodes)
        self._nodes = nodes
        self._env = {name: str(value) for name, value in (env_vars or {}).items()}
        self._started = False

    def start(self, extra_env_vars: Optional[Dict[str, Any]] = None) -> None:
        """extra_env_vars: of the ranks. RuntimeError without ray.init()."""
        if not ray.is_initialized():
            raise RuntimeError("ElasticRayExecutor.start: there is no connection to Ray; call ray.init() before it")
        self._env.update({name: str(value) for name, value in (extra_env_vars or {}).items()})
        self._started = True

    def run(self, worker_fn: Callable[[], Any], callbacks: Optional[List[Callable[[Any], Any]]] = None) -> List[Any]:
        """worker_fn() on every rank; what ranks 0 to min_num_proc - 1 of the last world return. Errors: RuntimeError as
        of an elastic lightcc.run; ValueError with callbacks, for which ranks have no connection to Ray."""
        if not self._started:
            raise RuntimeError("ElasticRayExecutor.run: call start() first")
        if callbacks:
            raise ValueError("ElasticRayExecutor.run: callbacks are for RayExecutor with num_workers; print instead")
        pickling.check(worker_fn, (), None)
        if client.ray.is_connected():
            return self._run_in_the_cluster(worker_fn)
        limits = self.settings.limits()
        assert self.settings.discovery is not None
        signals = (signal.SIGINT,) if threading.current_thread() is threading.main_thread() else ()
        with RunFiles([]) as run_files:
            with open(run_files.function, "wb", closefd=False) as file:
                pickling.write(file, worker_fn, (), None)
            job = Job([], lambda rank: [sys.executable, "-m", "lightcc.launch.task"], run_files=run_files,
                      settings={**pythonpath_setting(), **self.settings.environment(), **self._env},
                      set_on_hosts=["CUDA_VISIBLE_DEVICES"],  # in a task without GPUs, Ray has set ours to nothing
                      agent_command=self._agent_command, start_timeout_s=self.settings.timeout_s)
            outcome = driver.drive(job, limits, self.settings.discovery, 1, 2, signals, is_here=lambda name: False)
            return results.values(outcome, limits.min_num_proc, run_files)

    def _run_in_the_cluster(self, worker_fn: Callable[[], Any]) -> List[Any]:
        """By an actor, since agents are reached from a node of Ray only, and with Ray Client we are on none."""
        actor = ray.remote(_Adapter).options(num_cpus=0).remote()
        try:
            return ray.get(actor.run.remote(self, worker_fn))
        finally:  # its agents end with it
            ray.kill(actor)

    def _agent_command(self, host: str) -> List[str]:
        node = self._nodes.nodes.get(host, host)
        (resources,) = [one["Resources"] for one in ray.nodes() if one["NodeID"] == node]
        slots = self._nodes._slots(resources)
        reserved = [self._nodes.each.get(name, 0) * slots for name in ("CPU", "GPU")]
        return [sys.executable, "-m", "lightcc.ray.carry", ray.get_runtime_context().gcs_address, node,
                *map(str, reserved), agent_line()]


class _Adapter:
    """The actor that runs an elastic job for somebody who has come by Ray Client."""

    def run(self, executor: ElasticRayExecutor, worker_fn: Callable[[], Any]) -> List[Any]:
        return executor.run(worker_fn)
