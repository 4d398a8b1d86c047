"""The manifest of docs/kubernetes.md: its fields are those of KubeRay, and its commands those of Shoal."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from shoal.cli.app import app

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")

MANIFEST = Path(__file__).parents[1] / "examples" / "rayjob.yaml"


def record(required: str = "", **properties: Any) -> dict[str, Any]:
    """Schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


TEXT, NAME = {"type": "string", "minLength": 1}, {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
COUNT, FLAG = {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}]},
}
METADATA = record("name", name=NAME, labels=TEXTS, annotations=TEXTS)
POD = record(
    "containers",
    containers=list_of(
        record(
            "name image",
            name=NAME,
            image=TEXT,
            resources=record(requests=QUANTITIES, limits=QUANTITIES),
            volumeMounts=list_of(record("name mountPath", name=NAME, mountPath=TEXT)),
        )
    ),
    volumes=list_of(
        record(
            "name",
            name=NAME,
            persistentVolumeClaim=record("claimName", claimName=NAME),
            configMap=record("name", name=NAME),
            emptyDir=record(medium={"enum": ["", "Memory"]}),
        )
    ),
)
TEMPLATE = record("spec", metadata=METADATA, spec=POD)
RAY_JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=METADATA,
    spec=record(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        activeDeadlineSeconds={"type": "integer", "minimum": 1},
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        suspend=FLAG,
        runtimeEnvYAML=TEXT,
        rayClusterSpec=record(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling=FLAG,
            headGroupSpec=record("template", rayStartParams=TEXTS, template=TEMPLATE),
            workerGroupSpecs=list_of(
                record(
                    "groupName template",
                    groupName=NAME,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=TEXTS,
                    template=TEMPLATE,
                )
            ),
        ),
    ),
)
"""The fields of KubeRay's `RayJob` that a study may want; the operator has more."""
CONFIG_MAP = record(
    "apiVersion kind metadata data",
    apiVersion={"const": "v1"},
    kind={"const": "ConfigMap"},
    metadata=METADATA,
    data=TEXTS,
)


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Kind -> object of the manifest."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def test_the_manifest_fits_the_schema(objects: dict[str, Any]) -> None:
    jsonschema.validate(objects["RayJob"], RAY_JOB)
    jsonschema.validate(objects["ConfigMap"], CONFIG_MAP)
    assert set(objects) == {"RayJob", "ConfigMap"}


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("spec", "ttlSecondAfterFinished"), 60, "Additional properties are not allowed"),
        (("spec", "backoffLimit"), "5", "is not of type 'integer'"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0, "is not of type 'string'"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "groupName"), "GPU", "does not match"),
        (("apiVersion",), "ray.io/v1alpha1", "was expected"),
    ],
)
def test_the_schema_notices_mistakes(
    place: tuple[Any, ...], value: object, message: str, objects: dict[str, Any]
) -> None:
    wrong = within = deepcopy(objects["RayJob"])
    for key in place[:-1]:
        within = within[key]
    within[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError, match=message):
        jsonschema.validate(wrong, RAY_JOB)


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def test_all_pods_have_the_same_image_and_the_shared_volume_and_only_volumes_that_there_are(
    objects: dict[str, Any],
) -> None:
    everywhere = pods(objects["RayJob"])
    assert len({container["image"] for pod in everywhere for container in pod["containers"]}) == 1
    for pod in everywhere:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounted["shared"] == "/shared"
            assert mounted.keys() == volumes.keys()
            assert container["resources"]["requests"] == container["resources"]["limits"]
        assert volumes["shared"] == {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}


def test_kueue_takes_the_job_and_it_may_be_suspended(objects: dict[str, Any]) -> None:
    job = objects["RayJob"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert "suspend" not in job["spec"], "Kueue sets it"


def test_the_entrypoint_runs_commands_of_shoal_in_the_shared_directory(objects: dict[str, Any]) -> None:
    script = objects["ConfigMap"]["data"]["study.sh"]
    (head, *_) = pods(objects["RayJob"])
    (place,) = [x["mountPath"] for x in head["containers"][0]["volumeMounts"] if x["name"] == "study"]
    assert objects["RayJob"]["spec"]["entrypoint"] == f"sh {place}/study.sh"
    assert [x["configMap"]["name"] for x in head["volumes"] if "configMap" in x] == [
        objects["ConfigMap"]["metadata"]["name"]
    ]
    assert re.search(r"^study=/shared/", script)
    commands = get_command(app).commands  # type: ignore[attr-defined]
    found = re.findall(r"^ *exec shoal (\w+) (.*)$", script, re.MULTILINE)
    assert [name for name, _ in found] == ["resume", "run"]
    for name, rest in found:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", rest)) <= known
        assert "--backend ray" in rest
