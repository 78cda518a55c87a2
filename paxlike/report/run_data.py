# SPDX-License-Identifier: Apache-2.0
"""What the page shows of one run, read from its folder."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import UserError
from paxlike.report import run_config
from paxlike.telemetry import goodput, pace, run_paths, run_records, run_status

Record = dict[str, Any]

MAX_LAYERS = 200  # Columns of a heat map, which has about 400 pixels.
MAX_SAMPLES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunData:
  """A run on the page.

  Attributes:
    name: Short and distinct among the runs of the page.
    folder: Its path.
    state: See `run_status.RunStatus`; "unknown" if its status is damaged.
    progress: (completed updates, updates in all) by the run's status, if it has one.
    notes: What is damaged, besides what `config` says.
    config: Its configuration.
    records: Records of training and of evaluations; of many, those that `thinned` chooses.
    left_out: The number of records of training that are not among them.
    layers: Records of the metrics of layers, at most `MAX_LAYERS`.
    samples: Mappings with `source`, `prompt` and `text`, the newest last.
    goodput: On what its time was spent; None if it has no ledger.
  """

  name: str
  folder: str
  state: str | None
  progress: tuple[int, int] | None
  notes: tuple[str, ...]
  config: run_config.RunConfig
  records: list[Record]
  left_out: int
  layers: list[Record]
  samples: list[dict[str, str]]
  goodput: goodput.Goodput | None

  def last(self, kind: str, key: str, *, of: str | None = None) -> Any:
    """Returns the newest value of a metric, of an eval set if `of` names one; None if none."""
    rows = (r for r in reversed(self.records) if r.get("kind") == kind and r.get("set") == of)
    return next((r[key] for r in rows if is_number(r.get(key))), None)

  def typical(self, key: str) -> float | None:
    """Returns the median of a training metric after the start; None without one."""
    return pace.typical(self.records, key)

  @property
  def peaks(self) -> dict[str, int]:
    """The largest memory in bytes that the run has measured, of "device" and "host"."""
    found = {}
    for name in ("device", "host"):
      key = f"peak_{name}_bytes"
      if values := [record[key] for record in self.records if is_number(record.get(key))]:
        found[name] = max(values)
    return found

  @property
  def eval_sets(self) -> list[str]:
    """The names of its eval sets."""
    named = (r.get("set") for r in self.records if r.get("kind") == "eval")
    return sorted({name for name in named if name is not None})


def is_number(value: Any) -> TypeGuard[int | float]:
  """Returns whether a value of a record is a number."""
  return isinstance(value, int | float) and not isinstance(value, bool)


def read(
  path: str,
  *,
  name: str,
  max_records: int,
  allow_modules: Sequence[str] = (),
) -> RunData:
  """Reads the run in folder `path`.

  Args:
    path: The folder.
    name: What the page calls it.
    max_records: The largest number of records of training to keep.
    allow_modules: Modules outside of paxlike that its configuration may import.

  Raises:
    UserError: It is no run, has no records, or cannot be read.
  """
  run_paths.check(path)
  folder = epath.Path(path)
  with run_folder.reading(path):
    records = run_records.read(folder)
  of_kind: dict[str, list[Record]] = {}
  for record in records:
    of_kind.setdefault(record.get("kind", ""), []).append(record)
  train = thinned(of_kind.get("train", []), max_records)
  kept = {id(record) for record in (*train, *of_kind.get("eval", []))}
  if not kept:
    raise UserError(f"{path} has no records of training or evaluation yet.")
  with run_folder.reading(folder / "goodput"):
    ledger = goodput.summary(folder)
  return RunData(
    name=name,
    folder=path,
    **_status(folder),
    config=run_config.read(folder, num_devices=_num_devices(train), allow_modules=allow_modules),
    records=[record for record in records if id(record) in kept],
    left_out=len(of_kind.get("train", [])) - len(train),
    layers=_spread([r for r in of_kind.get("layers", []) if _has_layers(r)], MAX_LAYERS),
    samples=_spread([*_samples(of_kind.get("sample", [])), *_decoded(folder)], MAX_SAMPLES),
    goodput=ledger,
  )


def thinned(records: list[Record], most: int) -> list[Record]:
  """Returns at most `most` records: of each stretch those of the least and the largest loss.

  A loss that is not finite counts as the largest. The first and the last record are kept.
  """
  if len(records) <= most:
    return records
  num = max(1, (most - 2) // 2)
  inner = records[1:-1]
  chosen = [0, len(records) - 1]
  for part in range(num):
    places = range(part * len(inner) // num, (part + 1) * len(inner) // num)
    losses = {place: _loss(inner[place]) for place in places}
    chosen += [min(losses, key=losses.__getitem__) + 1, max(losses, key=losses.__getitem__) + 1]
  return [records[place] for place in sorted(set(chosen))]


def _loss(record: Record) -> float:
  return record["loss"] if is_number(record.get("loss")) else float("inf")


def _spread(items: list[Any], most: int) -> list[Any]:
  """Returns at most `most` items, evenly spaced, with the first and the last."""
  if len(items) <= most:
    return items
  return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


def _num_devices(records: Iterable[Record]) -> int | None:
  for record in records:
    every, one = record.get("tokens_per_second"), record.get("tokens_per_second_per_device")
    if is_number(every) and is_number(one) and one:
      return round(every / one)
  return None


def _status(folder: epath.Path) -> dict[str, Any]:
  """Returns the attributes of `RunData` that the run's status gives."""
  try:
    status = run_status.read(folder)
  except UserError as error:
    return {"state": "unknown", "progress": None, "notes": (str(error),)}
  if status is None:
    return {"state": None, "progress": None, "notes": ()}
  progress = None if None in status[1:] else status[1:]
  return {"state": status.state, "progress": progress, "notes": ()}


def _has_layers(record: Record) -> bool:
  """Returns whether a record has statistic -> group -> value of each layer."""
  layers = record.get("layers")
  return isinstance(layers, dict) and all(
    isinstance(groups, dict) and all(isinstance(values, list) for values in groups.values())
    for groups in layers.values()
  )


def _samples(records: Iterable[Record]) -> Iterator[dict[str, str]]:
  for record in records:
    source = f"after {record['updates']:,} updates"
    yield {
      "source": source,
      "prompt": _text(record.get("prompt")),
      "text": _text(record.get("text")),
    }


def _decoded(folder: epath.Path) -> Iterator[dict[str, str]]:
  """Yields the samples that --mode=decode has written, the oldest checkpoint first."""
  with run_folder.reading(folder / "decode_out"):
    for path in file_io.beginning_with(folder / "decode_out", "decode_"):
      source = f"decoded with checkpoint {path.stem.removeprefix('decode_').lstrip('0') or 0}"
      for line in file_io.read_bytes(path, limit=None).splitlines():
        try:
          found = json.loads(line)
          asked = _conversation(found["messages"]) if "messages" in found else found["prompt"]
          yield {"source": source, "prompt": _text(asked), "text": _text(found["text"])}
        except file_io.MALFORMED:
          continue  # Another process may be writing it.


def _conversation(messages: Any) -> str:
  found = messages if isinstance(messages, list) else [messages]
  return "\n".join(
    f"{one.get('role')}: {_text(one.get('content'))}" if isinstance(one, dict) else _text(one)
    for one in found
  )


def _text(value: Any) -> str:
  return value if isinstance(value, str) else "" if value is None else json.dumps(value)
