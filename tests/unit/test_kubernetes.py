"""The Kubernetes manifests: what Kubernetes and Strimzi take, and what dora understands."""

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from deepspeed.launcher import launch

from dora.bus.access import ROLES, default_principal
from dora.config import Config
from dora.config.loading import load_config
from dora.errors import ExitCode
from tests.manifests import (
    KUBERNETES,
    ROOT,
    built,
    check,
    containers,
    documents,
    identity,
    local_kafka,
    pod_of,
    understood,
)

BUILDS = {name: built(KUBERNETES / name) for name in ("base", "strimzi", "several-nodes")}
RUN = KUBERNETES / "base" / "run.toml"
MOUNTED = "/etc/dora/run.toml"
Resource = dict[str, Any]
EACH: list[Any] = []
for _build, _resources in BUILDS.items():  # what an earlier build has is checked once
    _known = [param.values[0] for param in EACH]
    EACH += [
        pytest.param(each, id="-".join((_build, *identity(each))))
        for each in _resources
        if each not in _known
    ]
PODS = [param for param in EACH if pod_of(param.values[0]) and list(containers(param.values[0]))]


def resource(build: str, kind: str, name: str) -> Resource:
    (found,) = [each for each in BUILDS[build] if identity(each) == (kind, name)]
    return found


def environment(container: Resource) -> dict[str, Any]:
    return {each["name"]: each for each in container["env"]}


def configured(container: Resource) -> Config:
    """The configuration as the container's processes read it, with stand-ins for its secrets."""
    values = {name: each.get("value", "stand-in") for name, each in environment(container).items()}
    return load_config(RUN, environment=values)


@pytest.mark.parametrize("resource", EACH)
def test_kubernetes_and_strimzi_take_the_manifest(resource: Resource) -> None:
    check(resource)


def test_the_check_refuses_what_is_wrong() -> None:
    job = resource("base", "Job", "dora-trainer")
    with pytest.raises(kubernetes_validate.ValidationError):
        check({**job, "spec": {**job["spec"], "backofLimit": 3}})
    kafka = resource("strimzi", "Kafka", "dora")
    with pytest.raises(jsonschema.ValidationError):
        check({**kafka, "spec": {**kafka["spec"], "entityOperators": {}}})
    pool = resource("strimzi", "KafkaNodePool", "broker")
    with pytest.raises(jsonschema.ValidationError):
        check({**pool, "spec": {**pool["spec"], "roles": ["zookeeper"]}})


@pytest.mark.parametrize("build", BUILDS)
def test_everything_that_is_named_is_there(build: str) -> None:
    """Claims, ConfigMaps and Secrets that pods use, by name and key; selectors find pods."""
    made = {identity(each): each for each in BUILDS[build]}
    users = {default_principal(role).removeprefix("User:") for role in ROLES}
    assert build == "base" or {n for kind, n in made if kind == "KafkaUser"} <= users
    labels = [pod_of(each)["metadata"]["labels"] for each in made.values() if pod_of(each)]  # type: ignore[index]
    for each in made.values():
        pod = pod_of(each)
        for volume in () if pod is None else pod["spec"]["volumes"]:
            match volume:
                case {"configMap": {"name": name}}:
                    assert RUN.name in made["ConfigMap", name]["data"]
                case {"persistentVolumeClaim": {"claimName": name}}:
                    assert ("PersistentVolumeClaim", name) in made
                case {"secret": {"secretName": name}}:
                    assert name == "dora-cluster-ca-cert"  # Strimzi's, of the cluster "dora"
                case _:
                    assert "emptyDir" in volume
        for container in containers(each):
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert pod is not None and mounts == {v["name"] for v in pod["spec"]["volumes"]}
            for value in container["env"]:
                secret = value.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or (secret["name"] in users and secret["key"] == "password")
        if each["kind"] in ("PodDisruptionBudget", "Service"):
            selector = each["spec"]["selector"]
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= label.items() for label in labels), identity(each)


@pytest.mark.parametrize("resource", PODS)
def test_dora_understands_its_command_and_configuration(resource: Resource) -> None:
    for container in containers(resource):
        words = container["command"]  # a launcher may come before dora
        parsed = understood(words[words.index("dora") + 1 :])
        assert parsed.params["config_path"] == Path(MOUNTED)
        mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        assert mounts[str(Path(MOUNTED).parent)] == "run"
        config = configured(container)
        properties = {k: v.get_secret_value() for k, v in config.kafka.properties.items()}
        name = resource["metadata"]["name"].replace("topics", "creator")
        assert properties["sasl.username"] == name and properties["sasl.password"] == "stand-in"
        assert str(Path(properties["ssl.ca.location"]).parent) in mounts
        # the password is in no manifest
        assert "value" not in environment(container)["DORA_KAFKA__PROPERTIES__SASL_PASSWORD"]


@pytest.mark.parametrize("resource", PODS)
def test_what_a_process_writes_lies_on_something_that_can_be_written(resource: Resource) -> None:
    for container in containers(resource):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = {m["mountPath"]: not m.get("readOnly", False) for m in container["volumeMounts"]}
        if resource["metadata"]["name"] == "dora-topics":
            continue  # writes nothing
        config = configured(container)
        for path in (config.run.directory, Path(environment(container)["HOME"]["value"])):
            (mount,) = [m for m in mounts if path.is_relative_to(m)]
            assert mounts[mount], path
        assert mounts["/tmp"]
        if "trainer" in resource["metadata"]["name"]:
            assert mounts["/store"], "the trainer writes weights"


@pytest.mark.parametrize("resource", PODS)
def test_probes_ask_what_the_process_serves(resource: Resource) -> None:
    several = resource["spec"].get("completionMode") == "Indexed"
    for container in containers(resource):
        probes = [container.get(f"{kind}Probe") for kind in ("startup", "liveness", "readiness")]
        if "topics" in resource["metadata"]["name"] or several:
            assert probes == [None] * 3
            continue
        (port,) = container["ports"]
        metrics = configured(container).metrics
        assert (port["name"], port["containerPort"]) == ("metrics", metrics.port)
        assert metrics.address == "0.0.0.0"
        paths = [probe["httpGet"]["path"] for probe in probes]
        assert paths == ["/health", "/health", "/ready"]
        annotations = pod_of(resource)["metadata"]["annotations"]  # type: ignore[index]
        assert annotations["prometheus.io/port"] == str(metrics.port)


def test_there_is_never_a_second_coordinator_or_trainer() -> None:
    coordinator = resource("base", "Deployment", "dora-coordinator")["spec"]
    assert (coordinator["replicas"], coordinator["strategy"]) == (1, {"type": "Recreate"})
    for build in BUILDS:
        trainer = resource(build, "Job", "dora-trainer")["spec"]
        assert trainer["podReplacementPolicy"] == "Failed"
        assert trainer["template"]["spec"]["restartPolicy"] == "Never"


def test_the_job_knows_the_exit_codes_of_the_trainer() -> None:
    (container,) = containers(resource("base", "Job", "dora-trainer"))
    rules = resource("base", "Job", "dora-trainer")["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert codes["FailJob"]["values"] == [ExitCode.USAGE, ExitCode.FENCED]
    assert codes["Ignore"]["values"] == [ExitCode.INCOMPLETE]
    assert all(code["containerName"] == container["name"] for code in codes.values())
    for build in BUILDS:
        (each,) = containers(resource(build, "Job", "dora-trainer"))
        assert "--fail-incomplete" in each["command"]


def test_the_trainer_has_a_gpu_for_each_rank() -> None:
    (container,) = containers(resource("base", "Job", "dora-trainer"))
    assert container["resources"]["limits"]["nvidia.com/gpu"] == configured(container).trainer.ranks


def test_the_launcher_understands_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resource("several-nodes", "Job", "dora-trainer")
    (container,) = containers(job)
    python, flag, module, *arguments = container["command"]
    assert (python, flag, module) == ("python", "-m", launch.__name__)
    index = environment(container)["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert "job-completion-index" in index
    given = [argument.replace("$(NODE_RANK)", "1") for argument in arguments]
    monkeypatch.setattr("sys.argv", [module, *given])
    parsed = launch.parse_args()
    assert (parsed.node_rank, parsed.module, parsed.no_local_rank) == (1, True, True)
    assert parsed.training_script == "dora"
    assert parsed.training_script_args == ["train", "--fail-incomplete", MOUNTED]
    world = json.loads(base64.urlsafe_b64decode(parsed.world_info))
    name, spec = job["metadata"]["name"], job["spec"]
    gpus = list(range(container["resources"]["limits"]["nvidia.com/gpu"]))
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert world == {f"{name}-{number}": gpus for number in range(spec["completions"])}
    service = resource("several-nodes", "Service", "dora-trainer")
    assert pod_of(job)["spec"]["subdomain"] == service["metadata"]["name"]  # type: ignore[index]
    assert parsed.master_addr == f"{name}-0.{service['metadata']['name']}"
    budget = resource("several-nodes", "PodDisruptionBudget", "dora-trainer")
    assert budget["spec"]["minAvailable"] == spec["completions"]


def test_the_cluster_keeps_what_a_run_needs() -> None:
    kafka = resource("strimzi", "Kafka", "dora")["spec"]["kafka"]
    pom = (ROOT / "ops" / "kafka" / "pom.xml").read_text()
    assert f"<kafka.version>{kafka['version']}</kafka.version>" in pom
    config = load_config(RUN, environment={})
    (listener,) = kafka["listeners"]
    assert config.kafka.bootstrap_servers == f"dora-kafka-bootstrap:{listener['port']}"
    assert listener["authentication"]["type"] == "scram-sha-512" and listener["tls"]
    brokers = resource("strimzi", "KafkaNodePool", "broker")["spec"]
    assert brokers["replicas"] >= config.kafka.replication_factor
    assert config.kafka.max_message_bytes <= kafka["config"]["message.max.bytes"]
    local = local_kafka()
    for name in ("message.max.bytes", "offsets.retention.minutes", "auto.create.topics.enable"):
        assert str(kafka["config"][name]).lower() == local[name], name
    for name, other in kafka["config"].items():
        if name.endswith("replication.factor"):
            assert other == brokers["replicas"]


def test_users_have_the_rights_of_their_roles() -> None:
    used = {
        environment(container)["DORA_KAFKA__PROPERTIES__SASL_USERNAME"]["value"]
        for each in BUILDS["strimzi"]
        for container in containers(each)
    }
    assert used <= {each["metadata"]["name"] for each in BUILDS["strimzi"]}


def test_no_file_is_left_out() -> None:
    named = {
        (directory / name).resolve()
        for directory in KUBERNETES.iterdir()
        if directory.is_dir()
        for plan in documents(directory / "kustomization.yaml")
        for name in (
            *plan["resources"],
            *(each["path"] for each in plan.get("patches", ())),
            *(file for each in plan.get("configMapGenerator", ()) for file in each["files"]),
        )
    }
    files = {path for path in KUBERNETES.rglob("*") if path.is_file()}
    assert {path.name for path in files - named} == {"kustomization.yaml"}
