# SPDX-License-Identifier: Apache-2.0
"""Writes files of records as a TFDS data set: one shard per file, so that writing can resume."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from paxlike.data.text import find_files, records
from paxlike.errors import UserError

_SPLIT = re.compile(r"(?<![a-z])(train|validation|valid|val|dev|test)(?![a-z])")
_SPLIT_NAMES = {"valid": "validation", "val": "validation", "dev": "validation"}
CHECKSUMS = "SHA256SUMS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schema:
  """A TFDS data set, and how records become examples.

  Attributes:
    name: `name:1.0.0` or `name/config:1.0.0`.
    splits: Its splits. A file whose name has no split belongs to the first.
    passed_over: Splits whose files are ignored, for example because they have no labels.
    fields: Feature -> (keys of records that may hold it, its type). The type is `str` or `int`; a
      bool counts as int.
  """

  name: str
  splits: tuple[str, ...]
  fields: Mapping[str, tuple[tuple[str, ...], type]]
  passed_over: tuple[str, ...] = ()

  @property
  def path(self) -> pathlib.PurePath:
    """Its folder relative to a TFDS data directory."""
    dataset, _, version = self.name.partition(":")
    return pathlib.PurePath(dataset) / version

  def split_of(self, file: pathlib.Path) -> str:
    """Returns the split named by a file or its folder.

    Raises:
      UserError: The data set has no such split.
    """
    found = _SPLIT.findall(file.name.lower())
    if _SPLIT.fullmatch(file.parent.name.lower()):
      found.append(file.parent.name.lower())
    split = _SPLIT_NAMES.get(found[0], found[0]) if found else self.splits[0]
    if len(self.splits) == 1:
      return self.splits[0]
    if split not in self.splits + self.passed_over:
      raise UserError(f"{file}: {self.name} has no split {split}, only {', '.join(self.splits)}.")
    return split

  def example(self, place: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the example of a record.

    Raises:
      UserError: A field is missing or of another type.
    """
    example = {}
    for feature, (keys, kind) in self.fields.items():
      value = next((record[key] for key in keys if key in record), None)
      if not isinstance(value, kind):
        what = "string" if kind is str else "integer"
        there = ", ".join(record)
        raise UserError(f"{place}: no {what} in field {' or '.join(keys)}. It has: {there}.")
      example[feature] = kind(value)
    return example


def write(
  schema: Schema,
  sources: Sequence[pathlib.Path],
  root: pathlib.Path,
  *,
  progress: Callable[[int], object] = lambda num_examples: None,
) -> pathlib.Path:
  """Writes a data set under `root`, and `SHA256SUMS` of its files; returns its folder.

  An interrupted write resumes after its finished shards.

  Args:
    schema: The data set.
    sources: Files of records, see `records`.
    root: A TFDS data directory.
    progress: Called with the number of examples just written or found written.

  Raises:
    UserError: The data set already exists, or a file does not fit the schema.
    OSError: The folder cannot be written.
  """
  folder = root / schema.path
  if folder.exists():
    raise UserError(f"{folder} already exists: remove it to write it again.")
  building = folder.with_name(f"{folder.name}.incomplete")
  building.mkdir(parents=True, exist_ok=True)
  splits: dict[str, list[pathlib.Path]] = {}
  for file in sources:
    splits.setdefault(schema.split_of(file), []).append(file)
  for split in schema.passed_over:
    splits.pop(split, None)
  lengths = {
    split: [
      _shard(schema, file, building / _shard_name(schema, split, number, len(part)), progress)
      for number, file in enumerate(part)
    ]
    for split, part in splits.items()
  }
  _describe(schema, building, lengths)
  for path in building.glob(".*.json"):
    path.unlink()
  sums = [f"{find_files.sha256(path)}  {path.name}\n" for path in sorted(building.iterdir())]
  (building / CHECKSUMS).write_text("".join(sums))
  building.rename(folder)
  return folder


def _shard_name(schema: Schema, split: str, number: int, of: int) -> str:
  return f"{schema.path.parts[0]}-{split}.tfrecord-{number:05d}-of-{of:05d}"


def _shard(
  schema: Schema, file: pathlib.Path, to: pathlib.Path, progress: Callable[[int], object]
) -> int:
  """Writes a file's examples as a shard unless it exists; returns their number."""
  import tensorflow as tf

  stat = file.stat()
  source = [os.path.abspath(file), stat.st_size, stat.st_mtime_ns]
  note = to.with_name(f".{to.name}.json")
  if to.exists() and note.exists():
    done = json.loads(note.read_text())
    if done["source"] == source:
      progress(done["count"])
      return done["count"]
  temporary = to.with_name(f".{to.name}")
  features = _features(schema)
  count = 0
  with tf.io.TFRecordWriter(os.fspath(temporary)) as writer:
    for example in _examples(schema, file):
      writer.write(features.serialize_example(features.encode_example(example)))
      count += 1
      progress(1)
  note.write_text(json.dumps({"source": source, "count": count}))
  temporary.rename(to)
  return count


def _examples(schema: Schema, file: pathlib.Path) -> Iterator[dict[str, Any]]:
  keys: Iterable[str] = {key for keys, _ in schema.fields.values() for key in keys}
  try:
    for place, record in records.read(os.fspath(file), keys):
      yield schema.example(place, record)
  except (OSError, EOFError, UnicodeDecodeError) as error:
    raise UserError(f"{file} cannot be read: {error}.") from error


def _features(schema: Schema) -> Any:
  import numpy as np
  import tensorflow_datasets as tfds

  kinds = {str: tfds.features.Text(), int: tfds.features.Scalar(np.int64)}
  return tfds.features.FeaturesDict({name: kinds[of] for name, (_, of) in schema.fields.items()})


def _describe(schema: Schema, folder: pathlib.Path, lengths: Mapping[str, list[int]]):
  """Writes the metadata of TFDS."""
  import tensorflow_datasets as tfds
  from etils import epath

  dataset, _, version = schema.name.partition(":")
  template = tfds.core.ShardedFileTemplate(
    data_dir=epath.Path(folder),
    dataset_name=schema.path.parts[0],
    filetype_suffix="tfrecord",
  )
  sizes = {
    split: sum(p.stat().st_size for p in folder.glob(f"*-{split}.tfrecord-*")) for split in lengths
  }
  tfds.folder_dataset.write_metadata(
    data_dir=folder,
    features=_features(schema),
    split_infos=[
      tfds.core.SplitInfo(
        name=split, shard_lengths=part, num_bytes=sizes[split], filename_template=template
      )
      for split, part in lengths.items()
    ],
    version=version,
    filename_template=template,
    check_data=False,
    description=dataset,
  )
