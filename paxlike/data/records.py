# SPDX-License-Identifier: Apache-2.0
"""Files of records: JSON lines, packed or not, parquet and arrow."""

import contextlib
import gzip
import io
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, cast

from paxlike import input_files
from paxlike.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")

LINE_BYTES = 2**26  # The longest record of JSON lines that is read.
# A small packed file may stand for more text than there is time for.
_UNPACKED_BYTES, _MAX_RATIO = 2**26, 500
_EMPTY_LINES = 1_000_000

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
  if name.endswith((".jsonl", ".gz", ".zst")):
    with input_files.opened(pathlib.Path(name)) as file:
      size = input_files.identity(file).size
      try:
        with _unpacked(name, file) as lines:
          yield from _json_lines(lines, name, size)
      except zlib.error as error:
        raise UserError(f"{name} cannot be read: {error}.") from None
  else:
    yield from _columns(name, set(fields))


@contextlib.contextmanager
def _unpacked(name: str, file: BinaryIO) -> Iterator[BinaryIO]:
  if name.endswith(".gz"):
    with gzip.open(file) as unpacked:
      yield cast(BinaryIO, unpacked)
  elif name.endswith(".zst"):
    import pyarrow  # Here: few users have such files. Unlike zstandard's, its reader sees a cut.

    with pyarrow.input_stream(file, compression="zstd") as unpacked:
      yield cast(BinaryIO, io.BufferedReader(cast(Any, unpacked), 1 << 20))
  else:
    yield file


def _json_lines(lines: BinaryIO, name: str, size: int) -> Iterator[Placed]:
  """Yields the records of the lines that a file of `size` bytes stands for."""
  unpacked = number = empty = 0
  while line := lines.readline(LINE_BYTES + 1):
    number += 1
    unpacked += len(line)
    if len(line) > LINE_BYTES:
      raise UserError(
        f"{name}:{number}: a line of more than {LINE_BYTES:,} bytes: make several records of it."
      )
    if unpacked > _UNPACKED_BYTES and unpacked > _MAX_RATIO * size:
      raise UserError(
        f"{name} stands for more than {_MAX_RATIO} times its size, as no text does: unpack it"
        " yourself if it is meant."
      )
    if number == 1:
      line = line.removeprefix(input_files.BOM.encode())
    if not line.strip():
      empty += 1
      if empty > _EMPTY_LINES:
        raise UserError(f"{name}:{number}: more than {_EMPTY_LINES:,} lines are empty.")
      continue
    record = input_files.parse_json(line.strip(), place=f"{name}:{number}", strict=False)
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
  except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
    if isinstance(error, UserError):
      raise
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
      batch.validate(full=True)  # Arrow follows the places in a file without looking at them.
      wanted = [column for column in batch.schema.names if column in fields]
      yield batch.select(wanted or batch.schema.names)
