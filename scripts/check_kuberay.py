"""Check cluster/kuberay/rayservice.yaml: its pods against Kubernetes, the rest against KubeRay.

The schemas of Kubernetes come with kubernetes-validate. KubeRay's is a file of its repository, a
megabyte that is not kept here: helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate  # type: ignore[import-not-found] # it is in .venv-cluster only
import yaml

PROJECT = Path(__file__).resolve().parents[1]
SERVICE = PROJECT / "cluster" / "kuberay" / "rayservice.yaml"


def closed(schema: Any) -> Any:
    """Return a schema that refuses unknown keys, which Kubernetes would drop without a word."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    open_ended = "additionalProperties" in found or found.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if (
        isinstance(found.get("properties"), dict)
        and found.get("type") == "object"
        and not open_ended
    ):
        found["additionalProperties"] = False
    if found.get("x-kubernetes-int-or-string"):
        found = {"type": ["integer", "string"]}
    return found


def pods(service: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of a service's pods as pods."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        for group in groups
    ]


def main(crd: str | None) -> None:
    """Raise if something is wrong. ``crd`` is KubeRay's file, None to leave it out."""
    service = yaml.safe_load(SERVICE.read_text(encoding="utf-8"))
    for pod in pods(service):
        kubernetes_validate.validate(pod, "1.37", strict=True)
    print("pods: valid for Kubernetes 1.37")
    if crd is None:
        print("KubeRay: not checked; KUBERAY_CRD=/path/to/ray.io_rayservices.yaml names its schema")
        return
    versions = yaml.safe_load(Path(crd).read_text(encoding="utf-8"))["spec"]["versions"]
    schema = next(one for one in versions if f"ray.io/{one['name']}" == service["apiVersion"])
    root = closed(schema["schema"]["openAPIV3Schema"])
    root["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(service, root)
    print("KubeRay: valid for its schema")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
