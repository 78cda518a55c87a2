# SPDX-License-Identifier: Apache-2.0
"""The schema of a JobSet that its authors publish.

`tests/launchers/jobset_v1alpha2.json.gz` is
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of kubernetes-sigs/jobset (08dfbdf,
Kubernetes 1.36, Apache-2.0), without descriptions.
"""

import gzip
import json
from typing import Any

from helpers.sources import REPOSITORY


def strict(schema: Any) -> Any:
  """Returns a schema that refuses unknown fields, as `kubectl create` does."""
  if isinstance(schema, list):
    return [strict(entry) for entry in schema]
  if not isinstance(schema, dict):
    return schema
  result = {key: strict(value) for key, value in schema.items()}
  is_closed = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
  return {"additionalProperties": False, **result} if is_closed else result


def published() -> Any:
  """Returns the schema, which refuses unknown fields."""
  path = REPOSITORY / "tests" / "launchers" / "jobset_v1alpha2.json.gz"
  schema = strict(json.loads(gzip.decompress(path.read_bytes())))
  schema["properties"]["metadata"] = {
    "type": "object"
  }  # Kubernetes' own, which the CRD leaves out.
  return schema
