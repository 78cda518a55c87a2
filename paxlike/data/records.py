# SPDX-License-Identifier: Apache-2.0
"""Files of records: JSON lines, packed or not, parquet and arrow."""

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paxlike.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")

# Where a record stands, for people; and the record.
Placed = tuple[str, Mapping[str, Any]]


def read(name: str, fields: Iterable[str]) -> Iterator[Placed]:
  """Yields the records of one file, as JSON has them.

  Args:
    name: The file, one of SUFFIXES.
    fields: Those wanted. A record may lack them, and may have others.

  Raises:
    UserError: A line is no JSON object, or the file is none of its kind.
    OSError, EOFError, UnicodeDecodeError: It cannot be read, is cut short, or is no UTF-8.
  """
  if name.endswith(".jsonl"):
    with open(name, encoding="utf-8") as file:
      yield from _json_lines(file, name)
  elif name.endswith(".gz"):
    with gzip.open(name, "rt", encoding="utf-8") as file:
      yield from _json_lines(file, name)
  elif name.endswith(".zst"):
    import pyarrow  # Here: few users have such files. Unlike zstandard's, its reader sees a cut.

    with pyarrow.input_stream(name, compression="zstd") as file:
      yield from _json_lines(io.TextIOWrapper(file, encoding="utf-8"), name)
  else:
    yield from _columns(name, set(fields))


def _json_lines(lines: Iterable[str], name: str) -> Iterator[Placed]:
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      record = json.loads(line)
    except json.JSONDecodeError as error:
      raise UserError(f"{name}:{number}: no JSON ({error.msg}).") from None
    if not isinstance(record, dict):
      raise UserError(f"{name}:{number}: no JSON object.")
    yield f"{name}:{number}", record


def _columns(name: str, fields: set[str]) -> Iterator[Placed]:
  import pyarrow  # Here: 170 MB, which most runs do not need.

  batches = _parquet if name.endswith(".parquet") else _arrow
  try:
    number = 0
    for batch in batches(name, fields):
      for record in batch.to_pylist():
        number += 1
        yield f"{name}, row {number}", record
  except pyarrow.ArrowException as error:
    kind = "parquet" if name.endswith(".parquet") else "arrow"
    raise UserError(f"{name} is no {kind} file: {error}") from error


def _parquet(name: str, fields: set[str]) -> Iterator[Any]:
  import pyarrow.parquet

  with pyarrow.parquet.ParquetFile(name) as file:
    names = [column for column in file.schema_arrow.names if column in fields]
    # Without the wanted, some, so that it can be said what there is.
    yield from file.iter_batches(1000, columns=names or file.schema_arrow.names)


def _arrow(name: str, fields: set[str]) -> Iterator[Any]:
  """Arrow has two formats under one name; Hugging Face writes streams."""
  import pyarrow

  with open(name, "rb") as file:
    random_access = file.read(6) == b"ARROW1"
  with pyarrow.memory_map(name) as source:
    if random_access:
      reader = pyarrow.ipc.open_file(source)
      batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
      batches = iter(pyarrow.ipc.open_stream(source))
    for batch in batches:
      wanted = [column for column in batch.schema.names if column in fields]
      yield batch.select(wanted or batch.schema.names)
