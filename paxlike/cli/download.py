# SPDX-License-Identifier: Apache-2.0
"""What the programs scripts/download_*.py do: raw files, fetched or given, to a TFDS data set."""

import dataclasses
import os
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence

from paxlike.data.seqio import fetch, tasks, tfds_writer
from paxlike.data.seqio.tfds_writer import Schema
from paxlike.data.text import files, records
from paxlike.errors import UserError
from paxlike.telemetry import console


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
  """A data set, and where its files are.

  Attributes:
    schema: The data set.
    urls: URL -> name of the file as it is kept; a .zip is unpacked.
    sha256: URL -> what its file must have, where that is known.
  """

  schema: Schema
  urls: Mapping[str, str]
  sha256: Mapping[str, str] = dataclasses.field(default_factory=dict)


def main(download: Download, argv: Sequence[str]) -> int:
  """Runs a command line. Returns the exit status: 2 for a user's mistake, or without network."""
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
      raise UserError(f"{folder} is there already: remove it to make it anew.")
    if options.source:
      given = [files.find(path, records.SUFFIXES, knob="--from") for path in options.source]
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
    print(f"{script}: stopped; the same command goes on from here.", file=sys.stderr)
    return 130
  print(f"{folder} has {download.schema.name}; read it with --tfds_data_dir={root}")
  return 0


def _parser(download: Download, script: str) -> console.Parser:
  parser = console.Parser(
    script, description=f"Makes the TFDS data set {download.schema.name}.", allow_abbrev=False
  )
  parser.add_argument(
    "--from",
    dest="source",
    metavar="PATH",
    type=console.path,
    action="append",
    help=f"files, folders or globs of {', '.join(records.SUFFIXES)}, instead of the network; may"
    " be repeated",
  )
  parser.add_argument(
    "--tfds_data_dir",
    metavar="DIR",
    type=console.path,
    default=os.fspath(tasks.tfds_data_dir()),
    help="where TFDS keeps its data sets (%(default)s)",
  )
  return parser


def _fetched(download: Download, root: pathlib.Path, script: str) -> list[pathlib.Path]:
  """Fetches the files into `root`/downloads."""
  folder = root / "downloads" / "paxlike" / download.schema.path
  fetched = []
  for url, name in download.urls.items():
    to = folder / name
    try:
      with _bar(name, unit="B") as bar:
        fetch.fetch(url, to, sha256=download.sha256.get(url), progress=bar.update)
    except UserError as error:
      raise UserError(f"{error} Or fetch it yourself, and give {script} --from=PATH.") from None
    fetched += _unpacked(to) if name.endswith(".zip") else [to]
  return fetched


def _unpacked(archive: pathlib.Path) -> list[pathlib.Path]:
  """Unpacks the files of records that a zip has."""
  try:
    with zipfile.ZipFile(archive) as packed:
      names = [name for name in packed.namelist() if name.endswith(records.SUFFIXES)]
      return [pathlib.Path(packed.extract(name, archive.with_suffix(""))) for name in names]
  except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
    raise UserError(f"{archive} is damaged ({error}): remove it.") from error


def _bar(what: str, *, unit: str):
  import tqdm

  return tqdm.tqdm(desc=what, unit=unit, unit_scale=True, disable=None)
