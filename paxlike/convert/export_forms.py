# SPDX-License-Identifier: Apache-2.0
"""The formats in which a model is exported, by name."""

import functools
from collections.abc import Callable, Mapping

from paxlike.convert.exported_form import Form, Plain
from paxlike.errors import UserError, did_you_mean


def _gguf(quantization: str | None = None) -> Form:
  from paxlike.convert.gguf_files import Gguf

  return Gguf(quantization)


def _fp8() -> Form:
  from paxlike.convert.quantized_forms import Fp8

  return Fp8("fp8_blocks")


def _compressed(name: str, rule: str) -> Form:
  from paxlike.convert.quantized_forms import Compressed

  return Compressed(name, rule)


# Value of --to_format -> the format, whose modules are imported when it is used.
FORMS: Mapping[str, Callable[[], Form]] = {
  "hf": Plain,
  "gguf": _gguf,
  "gguf_q8_0": functools.partial(_gguf, "Q8_0"),
  "fp8_blocks": _fp8,
  "compressed_fp8": functools.partial(_compressed, "compressed_fp8", "FP8"),
  "compressed_int8": functools.partial(_compressed, "compressed_int8", "INT8"),
  "compressed_int4": functools.partial(_compressed, "compressed_int4", "INT4"),
}


def form(name: str) -> Form:
  """Returns a format by its name.

  Raises:
    UserError: There is none, or the package that writes it is not installed.
  """
  if name not in FORMS:
    hint = did_you_mean(name, FORMS) or f" One of {', '.join(FORMS)}."
    raise UserError(f"--to_format={name} is unknown.{hint}")
  try:
    return FORMS[name]()
  except ModuleNotFoundError as error:
    if error.name != "gguf":
      raise
    raise UserError(
      f"--to_format={name} needs the package gguf: pip install paxlike[gguf]."
    ) from None
