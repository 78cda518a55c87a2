# SPDX-License-Identifier: Apache-2.0
"""`paxlike-convert --from=hf --path=SOURCE --to=DIR` imports, and `--from=paxlike` exports."""

import argparse
import os
import pathlib
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from paxlike import run_folder
from paxlike.convert import new_folder
from paxlike.devices import jax_setup, tpu_targets
from paxlike.errors import UserError, one_line
from paxlike.telemetry import console

if TYPE_CHECKING:
  from paxlike.convert.adapters import PeftAdapter, TrainedAdapters
  from paxlike.convert.exporting import ExportedRun
  from paxlike.convert.importing import Source
  from paxlike.convert.jax_checkpoint import JaxCheckpoint

_HELP = """\
Converts Hugging Face models (safetensors or .bin), Meta's LLaMA (.pth), PEFT adapters and
checkpoints of MaxText and Pax to paxlike, and checkpoints of paxlike to Hugging Face or PEFT, one
tensor at a time. A folder made for paxlike is all that `paxlike --mode=decode --job_log_dir=DIR`
needs. Knobs of the experiment that a checkpoint of MaxText or Pax becomes: --fdl.NAME=VALUE.
"""

_SOURCES = ("hf", "meta", "peft", "maxtext", "pax", "paxlike")
_JAX = ("maxtext", "pax")
_KNOB = re.compile(r"--?fdl\.([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
  """Entry point of the `paxlike-convert` command. Returns the exit status."""
  set_up()
  status = run(sys.argv[1:])
  if status > 128:
    # Threads of an interrupted write may still run, and Python would wait for them.
    os._exit(status)
  return status


def run(argv: Sequence[str]) -> int:
  """Runs a command line. Returns the exit status: 0, or 2 for a user's mistake."""
  try:
    status = _run(argv)
    sys.stdout.flush()
    return status
  except UserError as error:
    return _refused(error)
  except BrokenPipeError:
    # The reader of the output is gone. Python would print an error when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except OSError as error:
    return _refused(f"{error.filename or 'a file or the output'}: {error.strerror or error}.")
  except MemoryError:
    return _refused("out of memory.")
  except KeyboardInterrupt as error:
    return 128 + (error.args[0] if error.args else signal.SIGINT)
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _refused(error: object) -> int:
  print(f"paxlike-convert: {one_line(error)}", file=sys.stderr)
  return 2


def set_up():
  """Sets the environment variables that JAX and its libraries read, logging and signal handlers.

  A conversion computes on CPUs alone: plugins for accelerators would load for nothing, and print
  warnings where there are none.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  tpu_targets.settle()  # Also on machines with TPUs, which are not used.
  jax_setup.set_up(gpu_plugin=False, keep_heap=False)
  # After a failed write, Orbax abandons its pending coroutines.
  warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
  sys.unraisablehook = _report_unraisable
  for number in _STOPPING:
    if signal.getsignal(number) != signal.SIG_IGN:  # As nohup sets it.
      signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None):
  """Signal handler that ends the command by a KeyboardInterrupt with the signal's number."""
  place = frame
  while place is not None:
    if place.f_code.co_filename.startswith("<frozen importlib"):
      _stop_soon(number)  # C++ libraries abort if an import of theirs is interrupted.
      return
    place = place.f_back
  for other in _STOPPING:
    signal.signal(other, signal.SIG_IGN)  # So that the cleanup is not interrupted.
  raise KeyboardInterrupt(number)


def _stop_soon(number: int):
  signal.signal(signal.SIGALRM, lambda _, frame: _stop(number, frame))
  signal.setitimer(signal.ITIMER_REAL, 0.05)


def _report_unraisable(error: Any):
  if isinstance(error.exc_value, KeyboardInterrupt):
    _stop_soon(error.exc_value.args[0])  # Raised in a callback, which cannot propagate it.
  # After a failed write, TensorStore reports its other writes to an event loop that is closed.
  elif str(error.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(error)


def _run(argv: Sequence[str]) -> int:
  parser = console.Parser(prog="paxlike-convert", description=_HELP)
  parser.add_argument("--from", dest="source", choices=_SOURCES, required=True)
  parser.add_argument("--path", type=_path, required=True, help="the folder or file to convert")
  parser.add_argument(
    "--to", type=_path, required=True, metavar="DIR", help="the folder to write, new or empty"
  )
  parser.add_argument("--base", type=_path, metavar="DIR", help="the base model of the adapters")
  parser.add_argument(
    "--adapter", action="store_true", help="from paxlike: write the LoRA adapters, for PEFT"
  )
  parser.add_argument(
    "--to_format",
    metavar="NAME",
    help="from paxlike: the format of the files: hf (the default), gguf, gguf_q8_0, fp8_blocks,"
    " compressed_fp8, compressed_int8, compressed_int4",
  )
  parser.add_argument(
    "--step",
    type=int,
    help="from paxlike, maxtext and pax: the checkpoint's step (default: the newest)",
  )
  parser.add_argument(
    "--fdl_config",
    metavar="NAME",
    help="from maxtext and pax: the experiment that the checkpoint becomes",
  )
  parser.add_argument(
    "--dtype",
    choices=("float32", "bfloat16", "float16"),
    help="of the weights that are not quantized (default: float32)",
  )
  parser.add_argument(
    "--fdl_allow_modules",
    type=lambda text: tuple(text.split(",")),
    default=(),
    metavar="A,B",
    help="modules outside paxlike that the files of a run may use, or (from hf) that register the"
    " model's family",
  )
  parser.add_argument(
    "--dry_run", action="store_true", help="print which tensors each weight maps to; write nothing"
  )
  knobs = [match for arg in argv if (match := _KNOB.fullmatch(arg))]
  options = parser.parse_args([arg for arg in argv if not _KNOB.fullmatch(arg)])
  options.knobs = tuple((match[1], match[2]) for match in knobs)
  _check(options)
  source = _open(options)
  if options.dry_run:
    print(source.table())
    return 0
  dtype = options.dtype or "float32"
  source.convert(options.to, dtype=dtype)
  what = "an adapter for PEFT" if options.adapter else f"{len(source.matches)} weights"
  form = "" if options.to_format in (None, "hf") else f", as {options.to_format}"
  print(f"{options.to}: {what} in {dtype}{form}")
  for line in _notes(options, source):
    print(line)
  return 0


def _path(text: str) -> pathlib.Path:
  return pathlib.Path(console.path(text))


def _check(options: argparse.Namespace):
  """Raises a UserError if flags do not go together, or nothing can be written at --to."""
  for name, flag, sources in (
    ("adapter", "--adapter", ("paxlike",)),
    ("base", "--base", ("paxlike", "peft")),
    ("to_format", "--to_format", ("paxlike",)),
    ("step", "--step", ("paxlike", *_JAX)),
    ("fdl_config", "--fdl_config", _JAX),
    ("knobs", "--fdl.KNOB", _JAX),
    ("fdl_allow_modules", "--fdl_allow_modules", ("paxlike", "peft", "hf")),
  ):
    value = getattr(options, name)
    is_given = value is not False and value not in (None, ())  # 0 is given, and equal to False.
    if is_given and options.source not in sources:
      raise UserError(f"{flag} goes with --from={' or --from='.join(sources)}: leave it out.")
  if options.adapter and options.to_format is not None:
    raise UserError("--to_format is of whole models, not of --adapter: leave it out.")
  if options.to_format == "gguf_q8_0" and options.dtype not in (None, "float32"):
    raise UserError("GGUF stores what it does not quantize in float32: leave out --dtype.")
  if options.source == "peft" and options.base is None:
    raise UserError("--from=peft needs --base=DIR, a run or converted model.")
  new_folder.check_new(options.to, flag="to")
  if options.source != "paxlike":
    run_folder.check_name(options.to, flag="to")


def _notes(
  options: argparse.Namespace,
  source: "Source | ExportedRun | PeftAdapter | TrainedAdapters | JaxCheckpoint",
) -> list[str]:
  """Returns notes about the written folder for the user, one line each."""
  if options.source in ("hf", "meta", *_JAX):
    return cast("Source | JaxCheckpoint", source).notes()
  from paxlike.convert import tokenizer_files

  if options.source != "paxlike" or options.adapter:
    return []
  lines = tokenizer_files.notes(options.to)
  run = cast("ExportedRun", source)
  if run.lacks_mtp:
    lines.append("layers for multi-token prediction are left out: Hugging Face's model has none")
  if run.has_values:
    lines.append("the value head is left out: only training uses it")
  return lines


def _open(
  options: argparse.Namespace,
) -> "Source | ExportedRun | PeftAdapter | TrainedAdapters | JaxCheckpoint":
  # Imported here, after the flags were checked, because the imports are slow.
  if options.source == "peft":
    from paxlike.convert.adapters import PeftAdapter

    return PeftAdapter(options.path, base=options.base, allow_modules=options.fdl_allow_modules)
  if options.source == "paxlike":
    from paxlike.convert import export_forms
    from paxlike.convert.adapters import TrainedAdapters
    from paxlike.convert.exporting import ExportedRun

    run = ExportedRun(
      options.path,
      step=options.step,
      base=options.base,
      merges=not options.adapter,
      allow_modules=options.fdl_allow_modules,
      form=export_forms.form(options.to_format or "hf"),
    )
    if options.adapter:
      return TrainedAdapters(run)
    _ = run.tokenizer  # Raises if its file is missing.
    return run
  if options.source in _JAX:
    from paxlike.convert.jax_checkpoint import JaxCheckpoint, Requested

    opened = JaxCheckpoint.maxtext if options.source == "maxtext" else JaxCheckpoint.pax
    return opened(options.path, Requested(options.fdl_config, options.knobs), step=options.step)
  from paxlike import registry
  from paxlike.convert.importing import Source

  if options.source == "meta":
    return Source.meta(options.path)
  registry.import_modules(options.fdl_allow_modules)
  return Source.hugging_face(options.path)


if __name__ == "__main__":
  sys.exit(main())
