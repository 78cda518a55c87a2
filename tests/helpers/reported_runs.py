# SPDX-License-Identifier: Apache-2.0
"""Folders of runs for reports: configured as real ones, with records that cost nothing."""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from paxlike import registry, root_graph
from paxlike.cli import config_files


def write(
  folder: pathlib.Path,
  *,
  experiment: str = "Gpt3_52k",
  knobs: Mapping[str, str] | None = None,
  steps: int = 60,
  rate: float = 1.0,
  sets: tuple[str, ...] = ("validation",),
  layers: int = 0,
  sample: str | None = None,
  state: str = "finished",
) -> str:
  """Writes a run's folder; returns its path.

  Args:
    folder: The new folder.
    experiment: Whose configuration it has; "" for none.
    knobs: Those that were set for it.
    steps: Updates, each with a record.
    rate: How fast its loss falls.
    sets: Its eval sets.
    layers: Layers of its statistics; 0: it has none.
    sample: Text that it generated at its end.
    state: That of its status.
  """
  folder.mkdir(parents=True)
  if experiment:
    made = registry.find(experiment)()
    for name, value in (knobs or {}).items():
      made.set(name, value, source="command line")
    for name, content in config_files.of(made, root_graph.of_experiment(made)).items():
      if isinstance(content, str):
        (folder / name).write_text(content)
  lines = list(_records(steps, rate, sets, layers))
  if sample is not None:
    lines.append({"kind": "sample", "updates": steps, "prompt": "def ", "text": sample})
  text = "".join(f"{json.dumps(line)}\n" for line in lines)
  (folder / "metrics.jsonl").write_text(f'{text}{{"kind": "tra')
  status = {"state": state, "step": steps, "num_steps": steps, "time": 0.0, "host": "x", "pid": 1}
  (folder / "status.json").write_text(json.dumps(status))
  return str(folder)


def _records(
  steps: int, rate: float, sets: tuple[str, ...], layers: int
) -> Iterator[dict[str, Any]]:
  for updates in range(1, steps + 1):
    when = {"step": updates - 1, "updates": updates, "time": 1.7e9 + 2 * updates}
    noise = 0.2 * math.sin(37 * updates * rate)
    record: dict[str, Any] = {"kind": "train", **when}
    record["loss"] = None if updates == 7 else 2 + 5 * math.exp(-rate * updates / 20) + noise
    record |= {"grad_norm": 1 + noise, "learning_rate": 1e-3 * rate, "peak_device_bytes": 10**8}
    if updates > 1:
      seconds = 2 + 0.01 * noise
      record |= {"seconds_per_step": seconds, "tokens_per_second": 20_480 / seconds}
      record["tokens_per_second_per_device"] = record["tokens_per_second"] / 8
    yield record
    if updates % 20 == 0:
      for number, name in enumerate(sets):
        found = {"kind": "eval", "set": name, **when, "step": updates}
        loss = 2.1 + number + 5 * math.exp(-rate * updates / 20)
        yield found | {"log_pplx": loss, "log_pplx_stderr": 0.01, "loss": loss}
    if layers and updates % 5 == 0:
      values = [math.exp(-layer / 4) * (1 + updates / steps) for layer in range(layers)]
      norms = {"grad_norm": {"attention": values, "mlp": [2 * value for value in values]}}
      yield {"kind": "layers", **when, "layers": norms | {"rms": {"stream": [*values[1:], None]}}}
