# SPDX-License-Identifier: Apache-2.0
"""Wrong and odd command lines, run in this process, and what is said of each.

The bases are tiny experiments that have every knob between them. A step is traced but neither
compiled nor run: that is enough to know that its shapes and dtypes fit.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import re
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from paxlike import main, registry
from paxlike.experiments import datasets, gpt
from paxlike.training import memory_check, trainer
from paxlike.transfer import program

STATUSES = (0, 1, 2, 3)
# Of the processor; by the clock it may be many times as many, as other tests run beside these.
LIMIT_SECONDS = 20
# What a device is said to have: sizes at the upper ends of their ranges would take all there is.
_MEMORY = 2**28

_SIZES = {"VOCAB_SIZE": 300, "MAX_SEQ_LEN": 16, "MODEL_DIMS": 16, "HIDDEN_DIMS": 32}
_HEADS = {"NUM_LAYERS": 2, "NUM_HEADS": 2, "DIMS_PER_HEAD": 8}
_RUN = {"MAX_STEPS": 1, "PERCORE_BATCH_SIZE": 1, "ICI_MESH_SHAPE": "[-1,1,1]"}
_TINY = {**_SIZES, **_HEADS, **_RUN, "DCN_MESH_SHAPE": "[1,1,1]", "FPROP_DTYPE": "float32"}
_EXPERTS = {"NUM_EXPERTS": 4, "NUM_EXPERTS_PER_TOKEN": 2}


class TinyJsonl(datasets.Jsonl, gpt.Gpt126M):
  """Conversations."""


class TinyPreferences(datasets.Preferences, gpt.Gpt126M):
  """Pairs of answers."""


class TinyRewardPairs(datasets.RewardPairs, gpt.Gpt126M):
  """A reward model of such pairs."""


class TinyMixture(datasets.TextMixture, gpt.Gpt126M):
  """Several texts."""


# Name of an experiment -> the knobs that make it tiny. {folder} is that of `files`.
BASES: dict[str, dict[str, Any]] = {
  "Synthetic126M": {},
  "Text126M": {"DATA_PATH": "{folder}/text.txt", "CHECKPOINT_POLICY": "SAVE_NOTHING"},
  "SyntheticLLaMA7B": {"NUM_KV_HEADS": 1},
  "Gemma2_2B": {"NUM_KV_HEADS": 1, "WINDOW": 8, "QUERY_SCALE_DIMS": "none"},
  "Gemma3_1B": {"NUM_KV_HEADS": 1, "WINDOW": 8, "NUM_LAYERS": 6, "QUERY_SCALE_DIMS": "none"},
  "GptOss20B": {"NUM_KV_HEADS": 1, "WINDOW": 8, "EXPERT_DIMS": "none", **_EXPERTS},
  "Mixtral8x7B": {"NUM_KV_HEADS": 1, "EXPERT_DIMS": "none", **_EXPERTS},
  "SyntheticGLaM126M64E": {"EXPERT_DIMS": "none", **_EXPERTS},
  "DeepSeekV32": {
    **_EXPERTS,
    "INDEX_NUM_HEADS": 2,
    "INDEX_DIMS_PER_HEAD": 8,
    "INDEX_TOP_K": 4,
    "NUM_DENSE_LAYERS": 1,
    "DIMS_PER_ROPE_HEAD": 8,
    "DIMS_PER_VALUE_HEAD": 8,
    "EXPERT_DIMS": 16,
    "LATENT_DIMS": 8,
    "QUERY_LATENT_DIMS": 8,
    "NUM_EXPERT_GROUPS": 2,
    "NUM_EXPERT_GROUPS_PER_TOKEN": 1,
  },
  "helpers.command_lines.TinyJsonl": {"DATA_PATH": "{folder}/chat.jsonl"},
  "helpers.command_lines.TinyPreferences": {"DATA_PATH": "{folder}/pairs.jsonl"},
  "helpers.command_lines.TinyRewardPairs": {"DATA_PATH": "{folder}/pairs.jsonl"},
  "helpers.command_lines.TinyMixture": {"DATA_PATHS": "{{a: {folder}/text.txt}}"},
}


class Traced(BaseException):
  """The step of a run has been traced: it would begin."""


class TooLongError(BaseException):
  """A command line hangs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
  """What a command line is answered with.

  Attributes:
    status: The exit status; 0 also where the step was traced; None: an exception got out.
    err: What was printed to stderr, or the traceback.
    written: What is new in the folder in which runs are.
    seconds: Of the processor that it took.
  """

  status: int | None
  err: str
  written: tuple[str, ...]
  seconds: float

  @property
  def fault(self) -> str:
    """What is wrong with the answer; "" if nothing is."""
    lines = self.err.strip().splitlines()
    if self.status is None:
      return "hang" if "TooLongError" in lines[-1] else "traceback"
    if self.status not in STATUSES:
      return f"status {self.status}"
    if self.status and self.written:
      return "written"
    if "Traceback (most" in self.err or (self.status in (1, 2) and len(lines) > 3):
      return "several lines"
    if self.seconds > LIMIT_SECONDS:
      return "slow"
    return "silent" if self.status in (1, 2) and not lines else ""


@functools.cache
def files() -> pathlib.Path:
  """Returns a folder of data for the bases."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="paxlike-fuzz-"))
  (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall. " for i in range(99)))
  chat = [{"prompt": f"{i}?", "completion": f"{i}."} for i in range(60)]
  (folder / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in chat))
  (folder / "empty.txt").write_text("")
  os.mkfifo(folder / "pipe")  # Into which nobody writes.
  pairs = [{"prompt": f"{i}", "chosen": "b", "rejected": "c"} for i in range(60)]
  (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in pairs))
  return folder


def given_names(flags: list[str]) -> list[str]:
  """Returns what a refusal may call these flags by: flag, knob, path, its last part, or a value.

  An edit of what a knob gives may be called by that knob, with the new value, and a mapping by its
  keys, such as the axes of a mesh.
  """
  names = []
  for flag in flags:
    name, _, value = flag.removeprefix("--").partition("=")
    if name == "fiddler":
      names += [value.partition("(")[0], f"--{name}"]
    elif name.startswith("fdl."):
      path = name.removeprefix("fdl.")
      parts = [part for part in re.split(r"[.\[\]]", path) if part.isidentifier()]
      keys = re.findall(r"\w+(?=:)", value) if value.startswith("{") else []
      names += [f"--{name}", path, *parts[-1:], f"={value} ", *keys]
    else:
      names.append(f"--{name}")
  return [name for name in names if name]


def blamed_wrongly(flags: list[str], answer: "Answer") -> str:
  """Returns the first flag that is blamed and yet, left out, changes nothing; "" if there is none.

  Only what `error_diagnosis` answers is looked at: it blames flags that it has not understood.
  """
  message = answer.err.strip().splitlines()[-1].removeprefix("paxlike: ") if answer.err else ""
  if answer.status != 2 or "--traceback shows more" not in message:
    return ""
  for flag in flags:
    if message.startswith(flag[:80]):
      rest = run([other for other in flags if other != flag])
      return flag if rest.status != 0 and rest.err.partition(": ")[2] == message else ""
  return ""


def base(name: str) -> list[str]:
  """Returns the flags of a base."""
  known = registry.find(name).knobs()
  knobs = {**{knob: value for knob, value in _TINY.items() if knob in known}, **BASES[name]}
  texts = {knob: str(value).format(folder=files()) for knob, value in knobs.items()}
  return [f"--fdl_config={name}", *(f"--fdl.{knob}={text}" for knob, text in texts.items())]


def run(flags: list[str], *, traced: bool = True) -> Answer:
  """Runs a command line in this process.

  Args:
    flags: Its flags; `{run}` stands for a new folder, which is removed afterwards.
    traced: Whether a step is traced only, neither compiled nor run.
  """
  _tidy()
  with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _alone(), _limited():
    argv = ["paxlike", *(flag.replace("{run}", f"{folder}/run") for flag in flags)]
    err, began, status = io.StringIO(), time.process_time(), None
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
      try:
        with _tracing() if traced else contextlib.nullcontext():
          status = main.main(argv)
      except Traced:
        status = 0
      except BaseException as error:
        err.write("".join(traceback.format_exception(error)))
    seconds = time.process_time() - began
    written = tuple(sorted(str(p.relative_to(folder)) for p in pathlib.Path(folder).rglob("*")))
  printed = err.getvalue()
  if status is not None and "--traceback" in flags:  # Which was asked for.
    printed = "".join(printed.rpartition("paxlike: ")[1:])
  return Answer(status=status, err=printed, written=written, seconds=seconds)


@functools.cache
def _calls() -> Iterator[int]:
  return itertools.count(1)


def _tidy():
  """Forgets programs now and then: hundreds of models would fill the memory."""
  if next(_calls()) % 200 == 0:
    jax.clear_caches()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
  """Context of a command line, which may set what others see."""
  with (
    mock.patch.dict(os.environ),
    mock.patch.object(memory_check, "_memory", lambda devices: _MEMORY),
    warnings.catch_warnings(),
  ):
    warnings.simplefilter("ignore")
    yield


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
  compile_ = trainer.Trainer.compile

  def compiled(self: trainer.Trainer, state: Any, batch: Any, *, log_layers: bool = False) -> Any:
    self.lower(state, batch, log_layers=log_layers)
    raise Traced

  trainer.Trainer.compile = compiled
  try:
    with mock.patch.object(program.Program, "train", side_effect=Traced):
      yield
  finally:
    trainer.Trainer.compile = compile_


@contextlib.contextmanager
def _limited() -> Iterator[None]:
  def stop(number: int, frame: Any):
    del number, frame
    raise TooLongError

  # By the clock: what is raised while a worker collects garbage would end the worker.
  before = signal.signal(signal.SIGALRM, stop)
  signal.setitimer(signal.ITIMER_REAL, 15 * LIMIT_SECONDS)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
