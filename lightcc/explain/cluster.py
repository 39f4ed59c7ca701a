"""A cluster as lightcc-explain knows it, and the file that describes one (docs/explain.md)."""

import dataclasses
from typing import Any, Callable, NamedTuple, Optional


@dataclasses.dataclass
class Cluster:
    """Hosts and what they can carry. The defaults are those of hosts with one NIC of 25 Gbit/s.

    Ranks are numbered host by host. Every field but `hosts` is a key of the file.
    """

    hosts: list[int] = dataclasses.field(default_factory=lambda: [1])  # ranks of each
    nics: int = 1                    # of a host
    nic_gbit_per_s: float = 25.0     # of each NIC, each way
    full_duplex: bool = True         # False: both ways share that
    flow_gbit_per_s: float = 0.0     # most of one connection, as some clouds limit it; 0: no such limit
    latency_us: float = 30.0         # of a message between hosts
    message_us: float = 1.0          # of a rank's core, for each message that it sends
    local_latency_us: float = 1.0    # of a message inside a host
    memory_gbyte_per_s: float = 20.0  # of a host, read or written, by all of its ranks together
    pod_hosts: int = 0               # hosts below one switch; 0: all of them
    oversubscription: float = 1.0    # of a pod's uplink; 1: none

    @property
    def ranks(self) -> int:
        return sum(self.hosts)


@dataclasses.dataclass
class Training:
    """A training step whose speed is predicted: section `training` of the file."""

    gradient_mbyte: float            # 10^6 bytes, reduced once a step
    compute_ms: float                # of a step, without communication
    samples_per_rank: int            # of a step
    overlap: float = 0.0             # share of the communication that the backward pass hides, 0 to 1
    published: dict[str, float] = dataclasses.field(default_factory=dict)  # samples a second, by algorithm


class Description(NamedTuple):
    """What a cluster file says."""
    cluster: Cluster
    training: Optional[Training]


def load(path: str) -> Description:
    """Reads a cluster file, YAML. Raises ValueError with file, line, key and what is expected; OSError."""
    import yaml  # here, so that only those pay for it who use it

    with open(path, "rb") as file:
        try:
            root = yaml.compose(file, yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: this is no YAML: {' '.join(str(error).split())}") from None
    return _Reader(path, yaml).description(root)


def _number(least: float, above: bool = False, most: float = float("inf")) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        return (isinstance(value, (int, float)) and not isinstance(value, bool) and value < float("inf")
                and (value > least if above else value >= least) and value <= most)
    return fits


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


_POSITIVE = (_number(0, above=True), "a number above 0")
_NOT_NEGATIVE = (_number(0), "a number, 0 or more")
_CLUSTER = {
    "nics": (_whole(1), "a whole number, 1 or more"), "nic_gbit_per_s": _POSITIVE,
    "full_duplex": (lambda value: isinstance(value, bool), "true or false"), "flow_gbit_per_s": _NOT_NEGATIVE,
    "latency_us": _NOT_NEGATIVE, "message_us": _NOT_NEGATIVE, "local_latency_us": _NOT_NEGATIVE,
    "memory_gbyte_per_s": _POSITIVE, "pod_hosts": (_whole(0), "a whole number, 0 or more"),
    "oversubscription": (_number(1), "a number, 1 or more"),
}
_TRAINING = {
    "gradient_mbyte": _POSITIVE, "compute_ms": _NOT_NEGATIVE,
    "samples_per_rank": (_whole(1), "a whole number, 1 or more"),
    "overlap": (_number(0, most=1), "a number from 0 to 1"),
}
_MOST_HOSTS = 1 << 20


class _Reader:
    """Goes through YAML's nodes, which know their lines."""

    def __init__(self, path: str, yaml: Any):
        self._path, self._yaml = path, yaml

    def description(self, root: Any) -> Description:
        if root is None:
            raise ValueError(f"{self._path}: the file is empty; it needs at least hosts")
        entries = self._entries(root, "", ["hosts", "ranks_per_host", "training", *_CLUSTER])
        fields = {key: self._checked(node, key, *_CLUSTER[key]) for key, node in entries.items() if key in _CLUSTER}
        training = self._training(entries["training"]) if "training" in entries else None
        return Description(Cluster(self._hosts(root, entries), **fields), training)

    def _hosts(self, root: Any, entries: dict[str, Any]) -> list[int]:
        if "hosts" not in entries:
            raise self._wrong(root, "hosts", "missing", "how many hosts there are, or a list of the ranks of each")
        hosts = self._value(entries["hosts"])
        is_rank_count, ranks_key = _whole(1), entries.get("ranks_per_host")
        if isinstance(hosts, list):
            if not hosts or not all(map(is_rank_count, hosts)):
                raise self._wrong(entries["hosts"], "hosts", hosts, "a list of whole numbers, 1 or more, not empty")
            if ranks_key is not None:
                raise self._wrong(ranks_key, "ranks_per_host", self._value(ranks_key),
                                  "nothing: hosts already lists the ranks of each")
            return hosts
        if not is_rank_count(hosts) or hosts > _MOST_HOSTS:
            raise self._wrong(entries["hosts"], "hosts", hosts,
                              f"a whole number from 1 to {_MOST_HOSTS}, or a list of the ranks of each host")
        ranks = 1 if ranks_key is None else self._checked(ranks_key, "ranks_per_host", is_rank_count,
                                                          "a whole number, 1 or more")
        return [ranks] * hosts

    def _training(self, node: Any) -> Training:
        entries = self._entries(node, "training", [*_TRAINING, "published"])
        for key in ("gradient_mbyte", "compute_ms", "samples_per_rank"):
            if key not in entries:
                raise self._wrong(node, f"training.{key}", "missing", _TRAINING[key][1])
        fields = {key: self._checked(entry, f"training.{key}", *_TRAINING[key])
                  for key, entry in entries.items() if key in _TRAINING}
        published = {name: self._checked(entry, f"training.published.{name}", *_POSITIVE)
                     for name, entry in self._entries(entries["published"], "training.published").items()
                     } if "published" in entries else {}
        return Training(**fields, published=published)

    def _entries(self, node: Any, section: str, names: Optional[list[str]] = None) -> dict[str, Any]:
        expected = f"a mapping with the keys {', '.join(names)}" if names else "a mapping"
        if not isinstance(node, self._yaml.MappingNode):
            raise self._wrong(node, section or "the file", self._value(node), expected)
        entries: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            full = f"{section}.{name}" if section else name
            if names is not None and name not in names:
                raise ValueError(f"{self._place(key)}: unknown key '{full}'; there are {', '.join(names)}")
            if name in entries:
                raise ValueError(f"{self._place(key)}: '{full}' is there twice")
            entries[name] = value
        return entries

    def _checked(self, node: Any, key: str, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self._value(node)
        if not fits(value):
            raise self._wrong(node, key, value, expected)
        return value

    def _value(self, node: Any) -> Any:
        """What a node stands for, with YAML's own types."""
        constructor = self._yaml.constructor.SafeConstructor()
        return constructor.construct_document(node)

    def _place(self, node: Any) -> str:
        return f"{self._path}, line {node.start_mark.line + 1}"

    def _wrong(self, node: Any, key: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self._place(node)}: '{key}' is {value!r}; expected {expected}")
