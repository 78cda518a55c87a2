# SPDX-License-Identifier: Apache-2.0
"""Manifests of a checkpoint's files: their sizes and checksums, measured while it is saved.

The manifest `checksums/process_N.json` covers the array data that process N wrote. The manifest
`checksums.json` covers all other files, including those manifests. The last line of each manifest
is its own checksum. Local files have a checksum for every range of bytes that is a chunk of an
array (chunks that overlap share one), and for every range between them. On an object store,
checksums are the store's CRC32C of each object, known without a download.
"""

import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import xxhash
from etils import epath

from paxlike import file_io

FILE, FOLDER = "checksums.json", "checksums"

_BLOCK = 2**19  # Bytes per read; fits into a core's cache.


class Piece(NamedTuple):
  """A range of bytes of a file.

  Attributes:
    offset: Offset of the first byte.
    length: In bytes.
    digest: Checksum; None on an object store, which has one for the whole file.
    array: The array of which the range is a chunk; None if it is no chunk, or shared by several
      arrays.
  """

  offset: int
  length: int
  digest: str | None
  array: str | None


class File(NamedTuple):
  """A file as it was written.

  Attributes:
    size: In bytes.
    pieces: Ranges that cover the whole file.
    crc32c: The object store's checksum in Base64; None for a local file.
  """

  size: int
  pieces: tuple[Piece, ...]
  crc32c: str | None = None


def digest(data: bytes | bytearray | memoryview) -> str:
  """Returns a 64-bit checksum of bytes, in hexadecimal: XXH3."""
  return xxhash.xxh3_64_hexdigest(data)


def digest_of(blocks: Iterable[memoryview]) -> str:
  """Returns the checksum of the concatenated blocks."""
  state = xxhash.xxh3_64()
  for block in blocks:
    state.update(block)
  return state.hexdigest()


def blocks_of(path: epath.Path, offset: int, length: int) -> Iterator[memoryview]:
  """Yields a range of a file in blocks, reusing one buffer; stops early if the file is shorter."""
  buffer = memoryview(bytearray(min(_BLOCK, max(length, 1))))
  with open(path, "rb", buffering=0) if not file_io.is_remote(path) else path.open("rb") as file:
    file.seek(offset)
    while length:
      block = buffer[: min(length, len(buffer))]
      filled = 0
      while filled < len(block):
        count: Any = file.readinto(block[filled:])  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
          break
        filled += count
      if not filled:
        return
      yield block[:filled]
      length -= filled


def files_in(folder: epath.Path) -> dict[str, tuple[int, str | None]]:
  """Returns name -> (size, CRC32C on an object store) of every file in a folder."""
  if not file_io.is_remote(folder):
    paths = [path for path in pathlib.Path(folder).rglob("*") if not path.is_dir()]
    for path in paths:
      file_io.check_ends(path)
    return {p.relative_to(folder).as_posix(): (p.stat().st_size, None) for p in paths if p.exists()}
  import fsspec

  store, root = fsspec.core.url_to_fs(os.fspath(folder))
  store.invalidate_cache()
  found = store.find(root, detail=True)
  return {
    name.removeprefix(root).lstrip("/"): (info["size"], info.get("crc32c"))
    for name, info in found.items()
  }


def _array_of(key: str) -> str | None:
  """Returns the array of a chunk's key: `NAME/0.1` in Zarr 2, `NAME/c/0/1` in Zarr 3."""
  name, found, _ = key.partition("/")
  return name if found else None


def _chunks(state: epath.Path) -> dict[str, list[Piece]]:
  """Returns file -> the chunks of arrays that an OCDBT database stores in it, without checksums.

  Raises:
    ValueError: Its index cannot be read.
  """
  import tensorstore as ts

  place = os.fspath(state)
  spec = f"{place}/" if file_io.is_remote(state) else {"driver": "file", "path": f"{place}/"}
  base = ts.KvStore.open(spec).result()
  found: dict[str, list[Piece]] = {}
  nodes = [version["root"]["location"] for version in ts.ocdbt.dump(base).result()["versions"]]
  for location in (nodes := nodes[-1:]):  # Walks a B-tree breadth first: the list grows.
    for entry in ts.ocdbt.dump(base, location).result()["entries"]:
      if "location" in entry:
        nodes.append(entry["location"])
      elif "indirect_value" in entry:
        _, within, file, offset, length = entry["indirect_value"].split(":")
        piece = Piece(int(offset), int(length), None, _array_of(entry["key"].decode()))
        found.setdefault(f"{within}{file}", []).append(piece)
  return found


def _measured(path: epath.Path, size: int, chunks: Iterable[Piece]) -> File:
  """Returns a local file with the checksums of its chunks and of the ranges between them."""
  pieces: list[Piece] = []
  end = 0
  for chunk in [*sorted(chunks), Piece(size, 0, None, None)]:
    if chunk.offset > end:
      pieces.append(Piece(end, chunk.offset - end, None, None))
      end = chunk.offset
    length = chunk.offset + chunk.length - end
    if chunk.offset == end and length:
      pieces.append(chunk)
    elif length > 0 or chunk.length:  # OCDBT may store equal chunks once, so they overlap.
      last = pieces[-1]
      array = last.array if chunk.array == last.array else None
      pieces[-1] = last._replace(length=last.length + max(length, 0), array=array)
    end += max(length, 0)
  measured = [p._replace(digest=digest_of(blocks_of(path, p.offset, p.length))) for p in pieces]
  return File(size, tuple(measured))


def _measure(
  folder: epath.Path, names: Mapping[str, tuple[int, str | None]], chunks: Mapping[str, list[Piece]]
) -> dict[str, File]:
  result = {}
  for name, (size, crc32c) in names.items():
    within = chunks.get(name, [])
    if crc32c is None:
      result[name] = _measured(folder / name, size, within)
    else:
      result[name] = File(size, tuple(sorted(within)), crc32c)
  return result


def _text(files: Mapping[str, File]) -> str:
  """Returns the text of a manifest; its last line is its own checksum."""
  content = json.dumps({"version": 1, "files": files}) + "\n"
  return f"{content}{digest(content.encode())}\n"


def parsed(data: bytes) -> dict[str, File]:
  """Returns the files that a manifest lists.

  Raises:
    ValueError, and others of `file_io.MALFORMED`: It is damaged.
  """
  content, _, last = data.removesuffix(b"\n").rpartition(b"\n")
  if digest(content + b"\n").encode() != last or not data.endswith(b"\n"):
    raise ValueError("its own checksum is wrong")
  files = json.loads(content)["files"]
  return {
    name: File(size, tuple(_piece(*piece) for piece in pieces), crc32c)
    for name, (size, pieces, crc32c) in files.items()
  }


def _piece(offset: int, length: int, digest: str | None, array: str | None) -> Piece:
  # For converted checkpoints, earlier versions wrote `NAME/c/0` as the array.
  return Piece(offset, length, digest, array and _array_of(f"{array}/"))


def write_of_process(state: epath.Path, index: int):
  """Writes the manifest of the array data in `state` that process `index` has written.

  Raises:
    OSError, ValueError: It failed.
  """
  own = f"state/ocdbt.process_{index}"
  step = state.parent
  if not (step / own / "manifest.ocdbt").exists():  # This process had no shard to write.
    return
  chunks = {f"{own}/{name}": pieces for name, pieces in _chunks(step / own).items()}
  names = {f"{own}/{name}": what for name, what in files_in(step / own).items()}
  folder = step / FOLDER
  folder.mkdir(parents=True, exist_ok=True)
  measured = _measure(step, {name: names[name] for name in chunks}, chunks)
  (folder / f"process_{index}.json").write_text(_text(measured))


def write(folder: epath.Path, *, to_come: Mapping[str, bytes] | None = None):
  """Writes `checksums.json`: all files that no process's manifest covers.

  Args:
    folder: The checkpoint's folder.
    to_come: Name -> content of files that will be written before the commit.

  Raises:
    OSError, ValueError: It failed.
  """
  found = files_in(folder)
  covered = {
    name
    for path in found
    if path.startswith(f"{FOLDER}/")
    for name in parsed(file_io.read_bytes(folder / path))
  }
  names = {name: what for name, what in found.items() if name not in covered and name != FILE}
  # OCDBT's merged index refers to the processes' files, which the manifests of processes cover.
  chunks = {}
  if any(name.startswith("state/") and "/d/" in name for name in names):
    chunks = {f"state/{name}": pieces for name, pieces in _chunks(folder / "state").items()}
  files = _measure(folder, names, chunks)
  for name, content in (to_come or {}).items():
    piece = Piece(0, len(content), digest(content), None)
    files[name] = File(len(content), (piece,))
  (folder / FILE).write_text(_text(files))
