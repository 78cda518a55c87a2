# SPDX-License-Identifier: Apache-2.0
"""The names of dtypes, and the dtypes that values name."""

from typing import Any

from paxlike.config.knob_text import unquoted

NAMES = (
  "bool",
  "int2",
  "int4",
  "int8",
  "int16",
  "int32",
  "int64",
  "uint2",
  "uint4",
  "uint8",
  "uint16",
  "uint32",
  "uint64",
  "float16",
  "bfloat16",
  "float32",
  "float64",
  "complex64",
  "complex128",
  "float4_e2m1fn",
  "float6_e2m3fn",
  "float6_e3m2fn",
  "float8_e3m4",
  "float8_e4m3",
  "float8_e4m3b11fnuz",
  "float8_e4m3fn",
  "float8_e4m3fnuz",
  "float8_e5m2",
  "float8_e5m2fnuz",
  "float8_e8m0fnu",
)
_ALIASES = {
  "bf16": "bfloat16",
  "f16": "float16",
  "fp16": "float16",
  "f32": "float32",
  "fp32": "float32",
  "f64": "float64",
}


def name(value: Any) -> str | None:
  """Returns the name of the dtype that `value` is or names; None if it is none."""
  if isinstance(value, str):
    found = unquoted(value).lower().rpartition(".")[2]
  elif isinstance(value, type):
    # jnp.bfloat16 carries its dtype; NumPy's scalar types are named after theirs.
    found = getattr(getattr(value, "dtype", None), "name", value.__name__)
  else:
    found = getattr(value, "name", None)
  found = _ALIASES.get(found, found) if isinstance(found, str) else None
  return found if found in NAMES else None
