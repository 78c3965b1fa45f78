"""The part of the public API that our manifests use, written down from the field lists of JobSet v1alpha2, batch/v1 Job
and core/v1 Pod. An object may hold the fields named here and no others: a misspelt or misplaced one is found. What the
API checks beyond that (combinations of fields, sizes, immutability) is not here.
"""

from __future__ import annotations

import re
from typing import Any

LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def of(required: str = "", **fields: Any) -> dict[str, Any]:
    return {"type": "object", "required": required.split(), "fields": fields}


def many(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def one_of(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": words}


NAME = {"type": "string", "pattern": LABEL}
WORDS = {"type": "object", "values": TEXT}
VARIABLE = of("name", name=TEXT, value=TEXT, valueFrom=of(fieldRef=of("fieldPath", apiVersion=TEXT, fieldPath=TEXT)))
CONTAINER = of(
    "name image",
    name=NAME,
    image=TEXT,
    command=many(TEXT),
    args=many(TEXT),
    env=many(VARIABLE),
    ports=many(of("containerPort", containerPort=NUMBER, name=TEXT, protocol=TEXT)),
    resources=of(limits=WORDS, requests=WORDS),
    volumeMounts=many(of("name mountPath", name=NAME, mountPath=TEXT, readOnly=FLAG, subPath=TEXT)),
)
POD = of(
    "containers",
    restartPolicy=one_of("Never", "OnFailure"),
    terminationGracePeriodSeconds=NUMBER,
    nodeSelector=WORDS,
    containers=many(CONTAINER),
    volumes=many(
        of(
            "name",
            name=NAME,
            persistentVolumeClaim=of("claimName", claimName=TEXT, readOnly=FLAG),
            emptyDir=of(medium=one_of("", "Memory"), sizeLimit=TEXT),
        )
    ),
)
CODES = of("operator values", containerName=TEXT, operator=one_of("In", "NotIn"), values=many(NUMBER))
JOB = of(
    "template",
    completionMode=one_of("Indexed", "NonIndexed"),
    parallelism=NUMBER,
    completions=NUMBER,
    backoffLimit=NUMBER,
    activeDeadlineSeconds=NUMBER,
    podFailurePolicy=of(
        "rules", rules=many(of("action", action=one_of("FailJob", "Ignore", "Count"), onExitCodes=CODES))
    ),
    template=of("spec", metadata=of(labels=WORDS, annotations=WORDS), spec=POD),
)
RULE = of(
    "name action",
    name={"type": "string", "pattern": r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"},
    action=one_of("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    onJobFailureReasons=many(
        one_of(
            "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
        )
    ),
    targetReplicatedJobs=many(TEXT),
)
JOBSET = of(
    "apiVersion kind metadata spec",
    apiVersion=one_of("jobset.x-k8s.io/v1alpha2"),
    kind=one_of("JobSet"),
    metadata=of("name", name=NAME, namespace=NAME, labels=WORDS, annotations=WORDS),
    spec=of(
        "replicatedJobs",
        network=of(enableDNSHostnames=FLAG, subdomain=NAME, publishNotReadyAddresses=FLAG),
        failurePolicy=of(maxRestarts=NUMBER, rules=many(RULE)),
        replicatedJobs=many(of("name template", name=NAME, replicas=NUMBER, template=of("spec", spec=JOB))),
        suspend=FLAG,
        ttlSecondsAfterFinished=NUMBER,
    ),
)
TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}


def problems(value: Any, schema: dict[str, Any] = JOBSET, where: str = "") -> list[str]:
    """Everything in which a value is not as the schema says."""
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{where}: {value!r} is no {schema['type']}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        return [f"{where}: {value!r} does not match {schema['pattern']}"]
    if kind is list:
        return [p for i, item in enumerate(value) for p in problems(item, schema["items"], f"{where}[{i}]")]
    if kind is not dict:
        return []
    if "values" in schema:
        return [p for key, item in value.items() for p in problems(item, schema["values"], f"{where}.{key}")]
    found = [f"{where}: no {key}" for key in schema["required"] if key not in value]
    found += [f"{where}: unknown {key}" for key in value if key not in schema["fields"]]
    known = {key: item for key, item in value.items() if key in schema["fields"]}
    return found + [p for key, item in known.items() for p in problems(item, schema["fields"][key], f"{where}.{key}")]
