# SPDX-License-Identifier: Apache-2.0
"""Files of records: JSON lines (plain, gzip or zstd), Parquet and Arrow."""

import contextlib
import gzip
import io
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, cast

from paxlike import untrusted_files
from paxlike.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz", ".parquet", ".arrow")

LINE_BYTES = 2**26  # The longest line of JSON lines that is read.
# Protection against decompression bombs.
_UNPACKED_BYTES, _MAX_RATIO = 2**26, 500
_EMPTY_LINES = 1_000_000

# The place of a record, for messages, and the record.
Placed = tuple[str, Mapping[str, Any]]


def read(name: str, fields: Iterable[str]) -> Iterator[Placed]:
  """Yields the records of one file, with values as in JSON.

  Args:
    name: The file; ends with one of SUFFIXES.
    fields: The fields to read. A record may lack some, and may have others.

  Raises:
    UserError: A line is not a JSON object, or the file is not of the format of its suffix.
    OSError, EOFError, UnicodeDecodeError: It cannot be read, is truncated, or is not UTF-8.
  """
  if name.endswith((".jsonl", ".gz", ".zst")):
    with untrusted_files.opened(pathlib.Path(name)) as file:
      size = untrusted_files.identity(file).size
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
    import pyarrow  # Imported on demand. Unlike zstandard, its reader detects truncation.

    with pyarrow.input_stream(file, compression="zstd") as unpacked:
      yield cast(BinaryIO, io.BufferedReader(cast(Any, unpacked), 1 << 20))
  else:
    yield file


def _json_lines(lines: BinaryIO, name: str, size: int) -> Iterator[Placed]:
  """Yields the records of decompressed lines of a file of `size` bytes on disk."""
  unpacked = number = empty = 0
  while line := lines.readline(LINE_BYTES + 1):
    number += 1
    unpacked += len(line)
    if len(line) > LINE_BYTES:
      raise UserError(
        f"{name}:{number}: a line of more than {LINE_BYTES:,} bytes: split it into several records."
      )
    if unpacked > _UNPACKED_BYTES and unpacked > _MAX_RATIO * size:
      raise UserError(
        f"{name} decompresses to more than {_MAX_RATIO} times its size, which is not usual for"
        " text: decompress it yourself if that is intended."
      )
    if number == 1:
      line = line.removeprefix(untrusted_files.BOM.encode())
    if not line.strip():
      empty += 1
      if empty > _EMPTY_LINES:
        raise UserError(f"{name}:{number}: more than {_EMPTY_LINES:,} lines are empty.")
      continue
    record = untrusted_files.parse_json(line.strip(), place=f"{name}:{number}", strict=False)
    if not isinstance(record, dict):
      raise UserError(f"{name}:{number}: not a JSON object.")
    yield f"{name}:{number}", record


def _columns(name: str, fields: set[str]) -> Iterator[Placed]:
  import pyarrow  # 170 MB, which most runs do not need.

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
    raise UserError(f"{name} is not a valid {kind} file: {error}") from error


def _parquet(name: str, fields: set[str]) -> Iterator[Any]:
  import pyarrow.parquet

  with pyarrow.parquet.ParquetFile(name) as file:
    names = [column for column in file.schema_arrow.names if column in fields]
    # If no wanted column exists, read all, so that the caller's error can list them.
    yield from file.iter_batches(1000, columns=names or file.schema_arrow.names)


def _arrow(name: str, fields: set[str]) -> Iterator[Any]:
  """Yields the batches of either Arrow IPC format, file or stream; Hugging Face writes streams."""
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
      batch.validate(full=True)  # Arrow does not check a file's offsets on its own.
      wanted = [column for column in batch.schema.names if column in fields]
      yield batch.select(wanted or batch.schema.names)
