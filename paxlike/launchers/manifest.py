# SPDX-License-Identifier: Apache-2.0
"""Manifests as YAML."""

import re
from typing import Any


def without_references(script: str) -> str:
  """Returns a script for a pod's `command`, where Kubernetes expands `$(NAME)` and `$$`."""
  return re.sub(r"\$(?=[$(])", "$$", script)


def to_yaml(value: Any) -> str:
  """Returns YAML, with texts of several lines as blocks."""
  import yaml

  class Dumper(yaml.SafeDumper):
    pass

  def text(dumper: Any, data: str) -> Any:
    return dumper.represent_scalar(
      "tag:yaml.org,2002:str", data, style="|" if "\n" in data else None
    )

  Dumper.add_representer(str, text)
  return yaml.dump(value, Dumper=Dumper, sort_keys=False)
