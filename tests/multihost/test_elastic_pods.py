"""The launcher's arguments and the discovery script of examples/kubernetes/elastic.yaml, on hosts in place of pods. A
kubectl of this test answers in place of Kubernetes."""
import itertools
import os
from pathlib import Path

import yaml

from elastic_jobs import job, printed, result, trained

MANIFEST = Path(__file__).parents[2] / "examples/kubernetes/elastic.yaml"
# It knows the two calls that the manifest makes, word for word, and fails for any other.
KUBECTL = """#!/bin/sh
case "$*" in
"get pods --selector app=train-worker --field-selector status.phase=Running --output jsonpath={{range .items[*]}}\
{{.metadata.name}}{{\\"\\\\n\\"}}{{end}}") exec cat {folder}/pods ;;
"exec -i h"[0-9]" -- sh -c "*) host=$3; shift 4; exec ip netns exec {prefix}$host unshare --uts \
sh -c "hostname $host && exec \\"\\$@\\"" sh "$@" ;;
*) echo "kubectl: $*" >&2; exit 1 ;;
esac
"""


def parts():
    manifests = list(yaml.safe_load_all(MANIFEST.read_text()))
    (script,) = [one["data"]["discover_hosts.sh"] for one in manifests if one["kind"] == "ConfigMap"]
    (launcher,) = [one["spec"]["template"]["spec"]["containers"][0] for one in manifests if one["kind"] == "Job"]
    assert launcher["command"] == ["lightccrun"] and launcher["args"][-2:] == ["python", "/app/train.py"]
    return script, launcher["args"][:-2]


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


def test_pods_come_and_go(hosts, tmp_path):
    script, flags = parts()
    folder = tmp_path / "launcher"
    folder.mkdir()
    executable(folder / "discover_hosts.sh", script)
    executable(folder / "kubectl", KUBECTL.format(folder=folder, prefix=hosts.namespace("")))

    def pods(*names):
        (folder / "new").write_text("".join(f"{name}\n" for name in names))
        (folder / "new").rename(folder / "pods")

    pods("h0", "h1")
    flags = [str(folder / "discover_hosts.sh") if flag == "/launcher/discover_hosts.sh" else flag for flag in flags]
    running = job(tmp_path, *flags, passes="inf", pause_s=0.02, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    printed(running, "size 2\n")
    trained(running)
    pods("h0", "h1", "h2")
    printed(running, "size 3\n")
    trained(running)
    pods("h0")
    printed(running, "size 1\n")
    trained(running)
    (tmp_path / "stop").touch()
    code, out, err = running.finish()
    assert code == 0, err
    assert [size for size, _ in itertools.groupby(result(out))] == [2, 3, 1]
