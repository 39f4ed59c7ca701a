"""The manifests in examples/kubernetes, strictly: a field that is unknown fails. Kubernetes' own kinds and all pods
against its schemas, those of Kubeflow Trainer against its models of the API, and those of other operators against the
schemas in kinds."""
import copy
import os
import subprocess
import typing
from pathlib import Path

import pytest

NEEDS = "kubernetes_validate"
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
OWN = ("v1", "batch/v1", "apps/v1", "rbac.authorization.k8s.io/v1")
TRAINER = "trainer.kubeflow.org/v1alpha1"
KINDS = {"kubeflow.org/v2beta1": "mpijob.yaml", "batch.volcano.sh/v1alpha1": "volcano_job.yaml"}


def documents(name):
    import yaml

    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(value):
    """Those inside of kinds of operators. Of a patch of Trainer's there is only a part, which its models know."""
    if isinstance(value, dict):
        if isinstance(value.get("template"), dict) and "containers" in value["template"].get("spec", {}):
            metadata = {"name": "one", **value["template"].get("metadata", {})}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": value["template"]["spec"]}
        for name, one in value.items():
            if name != "runtimePatches":
                yield from pods(one)
    for one in value if isinstance(value, list) else ():
        yield from pods(one)


def validate(manifest):
    import jsonschema
    import kubernetes_validate
    import yaml

    if manifest["apiVersion"] in OWN:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    elif manifest["apiVersion"] == TRAINER:
        import kubeflow_trainer_api.models

        model = getattr(kubeflow_trainer_api.models, f"TrainerV1alpha1{manifest['kind']}")
        model.from_dict(manifest)  # types, and fields that must be there
        expect_known(manifest, model, manifest["kind"])
    else:
        schema = yaml.safe_load((Path(__file__).parent / "kinds" / KINDS[manifest["apiVersion"]]).read_text())
        jsonschema.validate(manifest, schema)


def expect_known(value, kind, where):
    """Trainer's models themselves pass over fields that they do not know."""
    kinds = [kind, *typing.get_args(kind)]
    if isinstance(value, dict) and (models := [one for one in kinds if hasattr(one, "model_fields")]):
        fields = {field.alias or name: field.annotation for name, field in models[0].model_fields.items()}
        for name, one in value.items():
            if fields and name not in fields and "actual_instance" not in models[0].model_fields:
                raise ValueError(f"{where} has no field {name}")
            expect_known(one, fields.get(name), f"{where}.{name}")
    for one in value if isinstance(value, list) else ():
        for inner in kinds:
            for item in typing.get_args(inner):
                expect_known(one, item, where)


def objects_of(value):
    """Each object inside of it whose fields have names of their own, and not the user's, as labels have."""
    if isinstance(value, dict):
        if value:  # else it is a pod that is checked by itself
            yield value
        users = ("metadata", "matchLabels", "data", "requests", "limits", "plugins")
        for name, one in value.items():
            if name not in users and not (name == "selector" and "clusterIP" in value):
                yield from objects_of(one)
    for one in value if isinstance(value, list) else ():
        yield from objects_of(one)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.yaml")))
def test_all_are_valid_and_an_unknown_field_is_not(name):
    found = documents(name)
    inside = [pod for one in found if one["apiVersion"] not in OWN for pod in pods(one)]
    for manifest in [*found, *inside]:
        validate(manifest)
        checked = manifest if manifest["apiVersion"] in (*OWN, TRAINER) else without_pods(manifest)
        for index in range(len(list(objects_of(checked)))):
            wrong = copy.deepcopy(checked)
            list(objects_of(wrong))[index]["completionMod"] = "Indexed"
            with pytest.raises(Exception, match="completionMod"):
                validate(wrong)


def without_pods(manifest):
    """They are checked by themselves."""
    found = copy.deepcopy(manifest)
    for one in objects_of(found):
        if "spec" in one.get("template", {}):
            one["template"]["spec"] = {}
    return found


def test_the_indexed_job_says_the_same_everywhere():
    service, job = documents("indexed_job.yaml")
    spec = job["spec"]["template"]["spec"]
    variables = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(variables["HOROVOD_SIZE"])
    host, port = variables["LIGHTCC_STORE_ADDR"].split(":")
    assert host == f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert spec["subdomain"] == service["metadata"]["name"]
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"] is True and service["spec"]["clusterIP"] == "None"


def test_volcanos_job_says_the_same_everywhere():
    (job,) = documents("volcano.yaml")
    (task,) = job["spec"]["tasks"]
    variables = {one["name"]: one.get("value") for one in task["template"]["spec"]["containers"][0]["env"]}
    assert job["spec"]["minAvailable"] == task["replicas"] == int(variables["HOROVOD_SIZE"])
    name = job["metadata"]["name"]
    assert variables["LIGHTCC_STORE_ADDR"].split(":")[0] == f"{name}-{task['name']}-0.{name}"
    assert {"env", "svc"} <= job["spec"]["plugins"].keys()
    command = [*task["template"]["spec"]["containers"][0]["command"], "printenv", "HOROVOD_RANK"]
    done = subprocess.run(command, env={**os.environ, "VC_TASK_INDEX": "1"}, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_train_jobs_fit_their_runtimes():
    runtime, job = documents("trainjob_mpi.yaml")
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    policy = runtime["spec"]["mlPolicy"]
    command = job["spec"]["trainer"]["command"]
    assert int(command[command.index("-np") + 1]) == policy["numNodes"] * policy["mpi"]["numProcPerNode"]
    jobs = {one["name"]: one for one in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert set(runtime["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"]) <= jobs.keys()


def test_the_image_of_the_mpi_manifests_has_what_they_name():
    """The user, the folder of keys, and the port and file of sshd; Open MPI and ssh."""
    text = (ROOT / "Dockerfile").read_text()
    image = text[text.index("AS mpi"):].partition("\nFROM")[0]
    assert "--uid 1000 mpiuser" in image and "openmpi-bin openssh-client openssh-server" in image
    for name in ("mpijob.yaml", "mpijob_elastic.yaml", "trainjob_mpi.yaml"):
        for pod in [pod for one in documents(name) for pod in pods(one)]:
            (container,) = pod["spec"]["containers"]
            assert container["image"].endswith("/lightcc-mpi:latest")
            assert container["securityContext"]["runAsUser"] == 1000
            if container.get("command") == ["/usr/sbin/sshd"]:
                assert container["args"][-1] == "/home/mpiuser/.sshd_config" and f"> {container['args'][-1]}" in image
                assert f"'Port {container['readinessProbe']['tcpSocket']['port']}'" in image
        assert "sshAuthMountPath: /home/mpiuser/.ssh" in (FOLDER / name).read_text()
    assert "'HostKey /home/mpiuser/.ssh/id_rsa'" in image
