"""Placement groups: which of Ray's nodes the workers get."""
from typing import Any, Dict, List, NamedTuple, Optional

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group


class Bundles(NamedTuple):
    """What a RayExecutor asks of Ray, and where in it the workers go."""

    each: Dict[str, float]  # resources
    count: int
    strategy: str
    bundle_of: List[int]    # by worker


def packed(num_workers: int, resources: Dict[str, float]) -> Bundles:
    return Bundles(resources, num_workers, "PACK", list(range(num_workers)))


def spread(num_hosts: int, num_workers_per_host: int, resources: Dict[str, float]) -> Bundles:
    """A bundle a host, which its workers share."""
    each = {name: amount * num_workers_per_host for name, amount in resources.items()}
    return Bundles(each, num_hosts, "STRICT_SPREAD",
                   [host for host in range(num_hosts) for _ in range(num_workers_per_host)])


def create_placement_group(resources_per_bundle: Dict[str, float], num_bundles: int, pg_timeout: Optional[float],
                           pg_strategy: str) -> PlacementGroup:
    """A placement group that has its resources. TimeoutError after pg_timeout seconds says what was asked for and what
    there is; the group is then gone. Source: horovod.ray.utils."""
    group = placement_group([dict(resources_per_bundle) for _ in range(num_bundles)], strategy=pg_strategy)
    try:
        ray.get(group.ready(), timeout=pg_timeout)
    except GetTimeoutError:
        remove_placement_group(group)
        raise TimeoutError(_unplaced(resources_per_bundle, num_bundles, pg_timeout, pg_strategy)) from None
    except BaseException:  # such as Ctrl-C
        remove_placement_group(group)
        raise
    return group


def _unplaced(each: Dict[str, float], count: int, timeout_s: Optional[float], strategy: str) -> str:
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    has = "; ".join(f"node {node['NodeManagerHostname']} has {text(node['Resources'])}" for node in nodes)
    return (f"Ray has not placed {count} x {{{text(each)}}} ({strategy}) within {timeout_s:g} s. Free now in the "
            f"cluster: {text(free) or 'nothing'}; {has}. Ask for fewer workers or less for each, free resources, add "
            "nodes, or wait longer: create_settings(placement_group_timeout_s=...)")


def text(resources: Dict[str, Any]) -> str:
    """Without what Ray keeps for itself: memory, and names of nodes."""
    own = {name: amount for name, amount in sorted(resources.items())
           if ":" not in name and name not in ("memory", "object_store_memory")}
    return ", ".join(f"{name}: {amount:g}" for name, amount in own.items())
