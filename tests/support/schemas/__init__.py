"""Schemas of the few fields that icom uses of objects whose own schema is in no package, and strict checks by them.

Written down from the operators' custom resource definitions (mpi-operator 0.8, training-operator 1.9) and eksctl's
configuration schema (0.230): every field that is not listed is refused. Pod templates are left to Kubernetes' schemas.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
from kubeflow_trainer_api import models

# A megabyte of JSON, which it would read for each object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)

KUBERNETES = ("1.29", "1.37")
"""The oldest release with what the Job needs, and the newest that kubernetes-validate knows."""
OWN = {
    "kubeflow.org/v2beta1 MPIJob": "mpijob.json",
    "kubeflow.org/v1 PyTorchJob": "pytorchjob.json",
    "eksctl.io/v1alpha5 ClusterConfig": "eksctl.json",
}
TRAINER = {
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
"""Kubeflow's own models, with JobSet's and Kubernetes' in them."""


def errors(item: dict[str, Any]) -> list[str]:
    """All that is wrong with an object; unknown fields are wrong."""
    return [*_errors(item)]


def _errors(item: dict[str, Any]) -> Iterator[str]:
    kind = f"{item.get('apiVersion')} {item.get('kind')}"
    if kind.startswith("trainer.kubeflow.org/v1alpha1 "):
        yield from _by_models(item)
    elif file := OWN.get(kind):
        schema = json.loads((Path(__file__).parent / file).read_text())
        for error in jsonschema.Draft202012Validator(schema).iter_errors(item):
            yield f"{kind} {'.'.join(map(str, error.absolute_path))}: {error.message}"
    else:
        yield from _by_kubernetes(item)
        return
    for path, template in pod_templates(item):
        shell = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        yield from (f"{path}: {error}" for error in _by_kubernetes(shell))


def pod_templates(item: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """What has containers, wherever it is."""
    for key, value in item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ():
        if key == "template" and isinstance(value, dict) and "containers" in (value.get("spec") or {}):
            yield f"{path}.{key}", value
        else:
            yield from pod_templates(value, f"{path}.{key}")


def _by_kubernetes(item: dict[str, Any]) -> Iterator[str]:
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(item, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{item['kind']} {version} {'.'.join(map(str, error.absolute_path))}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield error.message


def _by_models(item: dict[str, Any]) -> Iterator[str]:
    """They pass over fields that they do not know: what comes back shows which these are."""
    try:
        known = TRAINER[item["kind"]].from_dict(item)
    except ValueError as error:  # pydantic's
        yield str(error)
        return
    assert known is not None
    yield from _lost(item, known.to_dict(), item["kind"])


def _lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{path}.{key}: unknown"
            else:
                yield from _lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from _lost(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} is read as {kept!r}"
