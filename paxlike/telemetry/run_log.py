# SPDX-License-Identifier: Apache-2.0
"""Logs a run to the console, its trackers, callbacks and `status.json`."""

import collections
import contextlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import RunError, UserError, one_line
from paxlike.processes import verdicts
from paxlike.telemetry import formatting, goodput, metric_files, run_status
from paxlike.telemetry.callbacks import Callback, Callbacks
from paxlike.telemetry.console import Console
from paxlike.telemetry.pace import Pace
from paxlike.telemetry.run_header import RunHeader
from paxlike.telemetry.step_metrics import TOKENS_OF, Reading
from paxlike.telemetry.trackers.recorder import Recorder, Tracking

_REWARDS = ("reward_margin", "reward_accuracy", "reward", "answer_tokens", "entropy")
_TRACKING = Tracking()


class RunLog:
  """The log of one run. Only process 0 writes and prints.

  Attributes:
    skipped_in_a_row: Number of consecutive steps, up to the last, that were skipped: they were not
      finite, or spikes.
    check_owner: Raises if this process may no longer write.
  """

  def __init__(
    self,
    folder: epath.Path,
    *,
    write_summaries: bool = True,
    check_owner: Callable[[], None] = lambda: None,
    callbacks: Sequence[Callback] = (),
    ledger: goodput.Ledger | None = None,
    tracking: Tracking = _TRACKING,
  ):
    """Opens nothing yet; only process 0 calls `callbacks`.

    Args:
      folder: The run's folder.
      write_summaries: Whether to write metric files.
      check_owner: See the class.
      callbacks: Callbacks of training.
      ledger: The ledger of the time of training, which is closed with the log.
      tracking: The trackers.
    """
    self.check_owner = check_owner
    self.skipped_in_a_row = 0
    self._folder = folder
    self._main = jax.process_index() == 0
    self._recorder = Recorder(folder, tracking) if write_summaries and self._main else None
    self._console = Console()
    self._callbacks = Callbacks(callbacks if self._main else ())
    self._ledger = ledger
    self._pace: Pace | None = None
    self._of_pace: dict[str, Any] = {}
    self._saved: collections.deque[tuple[int, epath.Path]] = collections.deque()  # For `on_save`.
    self._state: str | None = None
    self._num_steps = 0
    self._times: list[float] = []
    self._tokens: collections.Counter[str] = collections.Counter()  # By source.
    self._skipped = 0
    self._status: int | None = None  # The step in status.json.
    self._began = time.perf_counter()
    self._causes: dict[str, None] = {}  # Why steps since the last line have no time, in order.
    self._is_out_of_reach = False  # Whether a write to the object store has failed.

  def is_past(self, step: int, *, num_steps: int) -> bool:
    """Returns whether the newest checkpoint is beyond the last step, and prints that.

    There is nothing to train then, and the folder stays as it is.
    """
    if step > num_steps:
      self.note(
        f"nothing to train: checkpoint {step} is beyond the last step, {num_steps}; to continue,"
        " raise MAX_STEPS (or NUM_EPOCHS)"
      )
      if self._ledger is not None:
        self._ledger.leave_out()
    return step > num_steps

  def start(
    self,
    header: RunHeader,
    files: Mapping[str, str | bytes | None],
    *,
    step: int,
    num_steps: int,
    **of_pace: Any,
  ):
    """Opens the files and prints the header; `step` updates are complete.

    After a rollback it is called again, with the step of the checkpoint.

    `files`, name -> content, are written unless all steps are complete; None removes the file.
    `of_pace` are arguments of `Pace`.
    """
    is_first = self._pace is None
    self._num_steps = num_steps
    self._of_pace = of_pace
    self.stage(header)
    self.skipped_in_a_row = 0
    self._tokens.clear()
    if not self._main:
      return
    if self._recorder is not None:
      metric_files.check(self._folder)
    with self._writing():
      for name, text in files.items() if step < num_steps or not step else ():
        if text is None:
          (self._folder / name).unlink(missing_ok=True)
        else:
          if "/" in name and not file_io.is_remote(self._folder):
            (self._folder / name).parent.mkdir(exist_ok=True, parents=True)
          file_io.write(self._folder / name, text)
      if self._recorder is not None:
        self._recorder.start(header, files, step=step)
    if self._ledger is not None:
      if not is_first:
        self._ledger.rolled_back(step)
      self._ledger.updates = step
    self.status("running", step)
    self._callbacks.call("on_start", step, self._folder)
    if is_first:
      self.note(header.text(self._folder, num_steps))
    if step and step == num_steps:
      self.note(
        f"nothing to train: all {step} steps are complete; to continue, raise MAX_STEPS (or"
        f" NUM_EPOCHS), as by --fdl.MAX_STEPS={2 * step}"
      )

  def stage(self, header: RunHeader):
    """Begins a stage: later speeds use the sizes in `header`. No earlier step may be in flight."""
    self._header = header
    self._pace = Pace(header, num_steps=self._num_steps, **self._of_pace)
    self._times.clear()

  def saved(self, step: int, checkpoint: epath.Path):
    """Records a complete checkpoint; may be called in any thread."""
    self._saved.append((step, checkpoint))

  def _call_on_save(self):
    while self._saved:
      self._callbacks.call("on_save", *self._saved.popleft())

  def note(self, text: str):
    """Prints a line."""
    if self._main:
      self._console.line(text)

  def piece(self, text: str):
    """Prints a part of a line."""
    if self._main:
      self._console.line(text, end="")

  def step(self, reading: Reading, *, due: bool):
    """Records a completed step, and logs it if `due`."""
    skipped = reading.values["skipped"] > 0
    self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
    self._skipped += skipped
    if reading.seconds is not None:
      self._times.append(reading.seconds)
    self._causes |= dict.fromkeys(reading.causes)
    for name, value in reading.values.items():
      if name.startswith(TOKENS_OF):
        self._tokens[name] += round(value)
    if not self._main:
      return
    assert self._pace is not None
    self._pace.add(reading)
    done = reading.step + 1
    if self._ledger is not None:
      self._ledger.updates = done
    self._console.progress(done, self._num_steps, f"loss {reading.values['loss']:.4f}")
    self._callbacks.call("on_step", done, dict(reading.values))
    if reading.values.get("spike"):
      loss, norm = reading.values["loss"], reading.values["grad_norm"]
      dropped = ", dropped" if skipped else ""
      self.note(f"step {reading.step}: spike: loss {loss:.3f}, gradient norm {norm:.3g}{dropped}")
    if due or done == self._num_steps:
      self._log(reading)
    self._call_on_save()

  def _log(self, reading: Reading):
    seconds = sum(self._times) / len(self._times) if self._times else None
    self._times.clear()
    values = reading.values | self._tokens
    self._tokens.clear()
    loss = values.pop("loss")
    skipped = values.pop("skipped")
    speed = {} if seconds is None else self._header.speed(seconds)
    line = [f"completed step: {reading.step}"]
    if seconds is None:
      since = time.perf_counter() - self._began
      line.append(f"seconds: {since:.3f} (with {formatting.listed(self._causes)})")
    else:
      line.append(f"seconds: {seconds:.3f}")
      rates = {
        "TFLOP/s": "tflops_per_second_per_device_causal",
        "Tokens/s": "tokens_per_second_per_device",
      }
      line += [f"{unit}/device: {speed[name]:.3f}" for unit, name in rates.items() if name in speed]
    line += [f"total_weights: {reading.weight:.0f}", f"loss: {loss:.3f}"]
    line.append(f"learning_rate: {values['learning_rate']:.2e}")
    # The main metrics of preference optimization and reinforcement learning.
    line += [f"{name}: {values[name]:.3f}" for name in _REWARDS if name in values]
    if left := self._pace and self._pace.left(reading.step):
      values["seconds_left"] = left
      line.append(f"left: {formatting.duration(left)}")
    if skipped:
      line.append("skipped: spike" if values.get("spike") else "skipped: not finite")
    self._console.line(", ".join(line))
    self._began = time.perf_counter()
    self._causes.clear()
    record = {
      "kind": "train",
      "step": reading.step,
      "updates": reading.step + 1,
      "time": time.time(),
      "loss": loss,
      **values,
      "total_weights": reading.weight,
      "skipped_steps": self._skipped,
      **speed,
      **_memory(),
    }
    self._record(record)

  def layers(self, step: int, table: Mapping[str, Mapping[str, Sequence[float | None]]]):
    """Records metric -> group -> the values of layers, of completed step `step`."""
    if self._main:
      counts = {"step": step, "updates": step + 1, "time": time.time()}
      self._record({"kind": "layers", **counts, "layers": table})

  def evaluated(
    self,
    name: str,
    updates: int,
    values: Mapping[str, float],
    records: Sequence[Mapping[str, Any]] = (),
  ):
    """Logs the metrics of eval set `name` after `updates` updates, and a record per example."""
    if not self._main:
      return
    listed = ", ".join(
      f"{key}: {value:.4f}" + (f" ± {values[error]:.4f}" if error in values else "")
      for key, value in values.items()
      for error in [f"{key}_stderr"]
      if not key.endswith("_stderr")
    )
    self._console.line(f"evaluated {name} after {updates} updates: {listed}")
    record = {"kind": "eval", "set": name, "updates": updates, "step": updates, "time": time.time()}
    self._record(record | dict(values) | {"loss": values.get("log_pplx")})
    path = run_status.result_of(self._folder, name, updates)
    text = json.dumps({"checkpoint": updates, **values}, indent=2)
    with self._writing():
      path.parent.mkdir(parents=True, exist_ok=True)
      if records:
        lines = "".join(f"{json.dumps(one)}\n" for one in records)
        file_io.write(path.with_suffix(".jsonl"), lines)
      file_io.write(path, text + "\n")
    self._callbacks.call("on_eval", updates, name, dict(values))

  def sampled(self, prompt: str, text: str, updates: int):
    """Prints and records how the model continues a prompt after `updates` updates."""
    if not self._main:
      return
    self.note(f"sample:\n{prompt}{text}")
    record = {"kind": "sample", "step": updates, "updates": updates, "time": time.time()}
    self._record(record | {"prompt": prompt, "text": text})

  def status(self, state: str, step: int):
    """Writes the run's state to `status.json`, which continuous evaluation reads.

    Metrics are flushed too, because a run resumed from this step does not repeat them.
    When training ends, its speed and goodput are printed.
    """
    self._status, self._state = step, state
    if not self._main:
      return
    now = {"state": state, "step": step, "num_steps": self._num_steps, "time": time.time()}
    now |= {"host": socket.gethostname(), "pid": os.getpid()}
    with self._writing():
      with verdicts.status_lock:
        if not verdicts.is_over.is_set():
          file_io.write(self._folder / "status.json", json.dumps(now) + "\n")
      if self._recorder is not None:
        self._recorder.sync()
      if self._ledger is not None:
        self._ledger.mark(step, finished=state == "finished")
    self._print_of_trackers()
    self._call_on_save()
    if state != "running":
      speed = None if self._pace is None else self._pace.text()
      spent = None if self._ledger is None else self._ledger.summary()
      for text in filter(None, (speed, spent and spent.text())):
        self.note(text)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type[BaseException] | None, *unused: object):
    self._console.close()
    if kind is not None and self._status is not None and not self._is_out_of_reach:
      # The failure may be that of writing, which is already reported.
      with contextlib.suppress(UserError, RunError):
        self.status("failed", self._status)
    with contextlib.ExitStack() as stack:
      stack.callback(self._end, kind)
      if self._ledger is not None:
        stack.callback(self._ledger.close, writes=not self._is_out_of_reach)
      if self._is_out_of_reach or self._recorder is None or not self._recorder.is_open:
        return  # A store's client would retry the last upload for minutes.
      allowed = (*file_io.failures(), UserError, RunError)
      stack.enter_context(self._writing() if kind is None else contextlib.suppress(*allowed))
      stack.enter_context(self._writing())
      self._recorder.close("failed" if kind else self._state or "stopped")
      self._print_of_trackers()

  def _end(self, kind: type[BaseException] | None):
    if self._state is None:
      return
    try:
      self._callbacks.call("on_end", "failed" if kind else self._state)
    except (UserError, RunError) as error:
      if kind is None:
        raise
      # The exception in progress must not be hidden.
      print(f"paxlike: {one_line(error)}", file=sys.stderr)

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    """Context of writing in the folder, which records whether a store fails."""
    self.check_owner()
    try:
      with run_folder.writing(self._folder):
        yield
    except UserError:
      self._is_out_of_reach = file_io.is_remote(self._folder)
      raise

  def _record(self, record: dict[str, Any]):
    self._callbacks.call("on_record", metric_files.clean(record))
    if self._recorder is not None:
      with self._writing():
        self._recorder.write(record)
      self._print_of_trackers()

  def _print_of_trackers(self):
    for line in () if self._recorder is None else self._recorder.lines():
      self.note(line)


def _memory() -> dict[str, int]:
  """Returns the peak memory of the process and, if it reports that, of the device, in bytes."""
  used = {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    used["peak_device_bytes"] = stats["peak_bytes_in_use"]
  return used
