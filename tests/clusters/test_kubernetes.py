"""The manifests in examples/kubernetes, as far as their kinds are Kubernetes' own: strictly against its schemas."""
import copy
from pathlib import Path

import pytest

NEEDS = "kubernetes_validate"
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
OWN = ("v1", "batch/v1", "apps/v1", "rbac.authorization.k8s.io/v1")


def manifests():
    """Each with the name of its file; and the pods inside kinds of operators."""
    import yaml

    for path in sorted(FOLDER.glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            if manifest["apiVersion"] in OWN:
                yield path.name, manifest
            for template in templates(manifest):
                yield path.name, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **template}


def templates(value):
    if isinstance(value, dict):
        if isinstance(value.get("template"), dict) and "containers" in value["template"].get("spec", {}):
            yield {"spec": value["template"]["spec"]}
        for one in value.values():
            yield from templates(one)


def validate(manifest):
    import kubernetes_validate

    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_all_are_valid_and_an_unknown_field_is_not():
    import kubernetes_validate

    found = list(manifests())
    assert {name for name, _ in found} == {path.name for path in FOLDER.glob("*.yaml")}
    for _, manifest in found:
        validate(manifest)
        wrong = copy.deepcopy(manifest)
        wrong.get("spec", wrong)["completionMod"] = "Indexed"
        with pytest.raises(kubernetes_validate.ValidationError):
            validate(wrong)


def test_the_indexed_job_says_the_same_everywhere():
    import yaml

    service, job = yaml.safe_load_all((FOLDER / "indexed_job.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    variables = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["HOROVOD_SIZE"])
    host, port = variables["LIGHTCC_STORE_ADDR"].split(":")
    assert host == f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert spec["subdomain"] == service["metadata"]["name"]
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"] is True and service["spec"]["clusterIP"] == "None"
