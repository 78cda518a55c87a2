# SPDX-License-Identifier: Apache-2.0
"""The command line of scripts/download_*.py, which write TFDS datasets from raw files."""

import dataclasses
import os
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence

from paxlike.data.seqio import fetch, tasks, tfds_writer
from paxlike.data.seqio.tfds_writer import Schema
from paxlike.data.text import find_files, records
from paxlike.errors import UserError
from paxlike.telemetry import console


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
  """A dataset and its raw files.

  Attributes:
    schema: The dataset.
    urls: URL -> local name of the raw file; .zip files are unpacked.
    sha256: URL -> the expected SHA-256 of its file, if known.
  """

  schema: Schema
  urls: Mapping[str, str]
  sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)


def main(download: Download, argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 2 for a user error or without network."""
  script = os.path.basename(argv[0])
  try:
    options = _parser(download, script).parse_args(argv[1:])
  except UserError as error:
    print(f"{script}: {error}", file=sys.stderr)
    return 2
  root = pathlib.Path(options.tfds_data_dir).expanduser()
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  try:
    folder = root / download.schema.path
    if folder.exists():
      raise UserError(f"{folder} already exists: remove it to write it again.")
    if options.source:
      given = [find_files.find(path, records.SUFFIXES, knob="--from") for path in options.source]
      raw = [pathlib.Path(name) for names in given for name in names]
    else:
      raw = _fetched(download, root, script)
    with _bar(f"writing {len(raw)} files", unit=" examples") as bar:
      folder = tfds_writer.write(download.schema, raw, root, progress=bar.update)
  except UserError as error:
    print(f"{script}: {error}", file=sys.stderr)
    return 2
  except OSError as error:
    where = error.filename or root
    print(f"{script}: {where} cannot be written: {error.strerror or error}.", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print(f"{script}: interrupted; run the same command to resume.", file=sys.stderr)
    return 130
  print(f"{folder} has {download.schema.name}; use it with --tfds_data_dir={root}")
  return 0


def _parser(download: Download, script: str) -> console.Parser:
  parser = console.Parser(
    script, description=f"Writes the TFDS dataset {download.schema.name}.", allow_abbrev=False
  )
  parser.add_argument(
    "--from",
    dest="source",
    metavar="PATH",
    type=console.path,
    action="append",
    help=f"files, folders or globs of {', '.join(records.SUFFIXES)} to read instead of"
    " downloading; repeatable",
  )
  parser.add_argument(
    "--tfds_data_dir",
    metavar="DIR",
    type=console.path,
    default=os.fspath(tasks.tfds_data_dir()),
    help="folder of TFDS datasets (%(default)s)",
  )
  return parser


def _fetched(download: Download, root: pathlib.Path, script: str) -> list[pathlib.Path]:
  """Downloads the files into `root`/downloads, and returns their paths."""
  folder = root / "downloads" / "paxlike" / download.schema.path
  fetched = []
  for url, name in download.urls.items():
    to = folder / name
    try:
      with _bar(name, unit="B") as bar:
        fetch.fetch(url, to, sha256=download.sha256.get(url), progress=bar.update)
    except UserError as error:
      raise UserError(f"{error} Or download it yourself, and run {script} --from=PATH.") from None
    fetched += _unpacked(to) if name.endswith(".zip") else [to]
  return fetched


def _unpacked(archive: pathlib.Path) -> list[pathlib.Path]:
  """Unpacks the record files of a zip, and returns their paths."""
  try:
    with zipfile.ZipFile(archive) as packed:
      names = [name for name in packed.namelist() if name.endswith(records.SUFFIXES)]
      return [pathlib.Path(packed.extract(name, archive.with_suffix(""))) for name in names]
  except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
    raise UserError(f"{archive} is damaged ({error}): remove it.") from error


def _bar(what: str, *, unit: str):
  import tqdm

  return tqdm.tqdm(desc=what, unit=unit, unit_scale=True, disable=None)
