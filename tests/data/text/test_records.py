# SPDX-License-Identifier: Apache-2.0
"""Every kind of file has the same records."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from paxlike.data.text import records
from paxlike.errors import UserError

RECORDS = [{"text": "a\nb", "n": 1, "ok": True}, {"text": "é漢\U0001f600", "n": 2, "ok": False}]


def write(path, kind, rows=RECORDS):
  lines = "\n".join(json.dumps(row) for row in rows).encode()
  table = pyarrow.Table.from_pylist(rows)
  if kind == "parquet":
    pyarrow.parquet.write_table(table, path)
  elif kind.startswith("arrow"):
    new = pyarrow.ipc.new_file if kind == "arrow file" else pyarrow.ipc.new_stream
    with new(str(path), table.schema) as writer:
      writer.write_table(table, max_chunksize=1)
  else:
    pack = {"jsonl": bytes, "gz": gzip.compress, "zst": zstandard.compress}[kind]
    path.write_bytes(pack(lines))
  return str(path)


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("a.jsonl", "jsonl"),
    ("a.json.gz", "gz"),
    ("a.jsonl.gz", "gz"),
    ("a.jsonl.zst", "zst"),
    ("a.parquet", "parquet"),
    ("a.arrow", "arrow file"),
    ("a.arrow", "arrow stream"),
  ],
)
def test_every_kind_has_the_same_records(tmp_path, name, kind):
  path = write(tmp_path / name, kind)
  found = list(records.read(path, ["text", "n", "ok", "more"]))
  assert [record for _, record in found] == RECORDS
  assert [place for place, _ in found] in (
    [f"{path}:1", f"{path}:2"],
    [f"{path}, row 1", f"{path}, row 2"],
  )
  # Without any of the wanted fields it can still be said what there is.
  assert all(record.keys() == RECORDS[0].keys() for _, record in records.read(path, ["more"]))


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "arrow file"])
def test_a_cut_file_is_refused(tmp_path, kind):
  name = tmp_path / {"gz": "a.jsonl.gz", "zst": "a.jsonl.zst", "parquet": "a.parquet"}.get(
    kind, "a.arrow"
  )
  write(name, kind, RECORDS * 500)
  name.write_bytes(name.read_bytes()[:-20])
  with pytest.raises((UserError, OSError, EOFError)):
    list(records.read(str(name), ["text"]))


def test_what_is_no_record_is_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_text('{"text": "a"}\n\n["a"]\n')
  with pytest.raises(UserError, match=r"a\.jsonl:3: not a JSON object"):
    list(records.read(str(path), ["text"]))
