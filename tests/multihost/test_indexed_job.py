"""The command and variables of examples/kubernetes/indexed_job.yaml on two hosts, as Kubernetes gives them to two pods.
Pod 0's name is unknown at first, as it is while the pod is being made."""
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from emulated import Hosts
from jobs import DEADLINE_S

ROOT = Path(__file__).parents[2]
# A name server that knows no name until somebody has asked so many times, and then this one. It says each answer.
NAME_SERVER = """
import socket, struct, sys
name, address, unknown = sys.argv[1], sys.argv[2], int(sys.argv[3])
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print("ready", flush=True)
asked = 0
while True:
    query, client = server.recvfrom(512)
    end = query.index(b"\\0", 12)
    labels, at = [], 12
    while at < end:
        labels.append(query[at + 1:at + 1 + query[at]].decode())
        at += 1 + query[at]
    kind = struct.unpack(">H", query[end + 1:end + 3])[0]
    known = ".".join(labels) == name and asked >= unknown
    asked += ".".join(labels) == name
    record = b"\\xc0\\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(address)
    answers = record if known and kind == 1 else b""
    flags = 0x8180 if known else 0x8183  # no such name
    header = query[:2] + struct.pack(">HHHHH", flags, 1, bool(answers), 0, 0)
    server.sendto(header + query[12:end + 5] + answers, client)
    print("known" if known else "unknown", flush=True)
"""
TRIES, QUERIES = 3, 2  # of init; a try asks for both families


@pytest.fixture
def pods():
    """Two hosts that ask a name server of their own, which h1 has."""
    with Hosts(2) as hosts:
        for name in hosts.names:
            (Path("/etc/netns") / hosts.namespace(name) / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        yield hosts


def variables(manifest, rank):
    """What Kubernetes would make of the container's env for the pod of this index."""
    found = {}
    for one in manifest["env"]:
        source = one.get("valueFrom", {})
        if "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            found[one["name"]] = str(rank)
        else:
            found[one["name"]] = "a secret" if "secretKeyRef" in source else one["value"]
    return found


def test_the_pods_meet_though_the_name_of_pod_0_comes_late(pods, tmp_path):
    *_, job = yaml.safe_load_all((ROOT / "examples/kubernetes/indexed_job.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    given = variables(container, 0)
    name = given["LIGHTCC_STORE_ADDR"].split(":")[0]
    server = pods.popen("h1", [sys.executable, "-c", NAME_SERVER, name, pods.addresses("h0")[0],
                               str(TRIES * QUERIES)], stdout=subprocess.PIPE)
    watchdog = threading.Timer(DEADLINE_S, server.kill)  # readline has no deadline
    watchdog.start()
    ranks = []
    try:
        assert server.stdout.readline() == "ready\n"
        python, script, *rest = [*container["command"], *container["args"]]
        assert python == "python"
        command = [sys.executable, str(ROOT / script.lstrip("/")), *rest, "--steps", "5"]

        def start(rank):
            command[command.index("--output") + 1] = str(tmp_path)
            ranks.append(pods.popen(f"h{rank}", command, env={**os.environ, **variables(container, rank)},
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT))

        start(1)
        for _ in range(TRIES * QUERIES):  # rank 1 looks for a name that there is not, more than once
            assert server.stdout.readline() == "unknown\n"
        start(0)
        outputs = [rank.communicate(timeout=DEADLINE_S)[0] for rank in reversed(ranks)]
        assert [rank.returncode for rank in ranks] == [0, 0], "".join(outputs)
        assert re.search(r"on 2 rank\(s\)", outputs[0]), outputs
    finally:
        watchdog.cancel()
        for process in [server, *ranks]:
            process.kill()
            process.communicate()
