# SPDX-License-Identifier: Apache-2.0
"""`paxlike-convert --from=hf --path=SOURCE --to=DIR`, and the way back by `--from=paxlike`."""

import argparse
import logging
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

from paxlike import run_folder
from paxlike.devices import gpu_targets, tpu_targets
from paxlike.errors import UserError, one_line
from paxlike.telemetry import console

if TYPE_CHECKING:
  from paxlike.convert.adapters import Adapter, Trained
  from paxlike.convert.exporting import Run
  from paxlike.convert.importing import Source

_HELP = """\
Converts models of Hugging Face (safetensors or .bin), and LLaMA as Meta gives it away (.pth), for
paxlike, and checkpoints of paxlike for Hugging Face, a tensor at a time. What is made for paxlike
is all that `paxlike --mode=decode --job_log_dir=DIR` needs.
"""


_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
  """Entry point of the `paxlike-convert` command. Returns the exit status."""
  _set_up()
  status = run(sys.argv[1:])
  if status > 128:
    # Threads of a write that was given up may go on, and Python would wait for them.
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
    # Who read the output has read enough. Python would complain when it flushes at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
  except OSError as error:
    return _refused(f"{error.filename or 'a file or the output'}: {error.strerror or error}.")
  except MemoryError:
    return _refused("the memory of this process does not suffice.")
  except KeyboardInterrupt as error:
    return 128 + (error.args[0] if error.args else signal.SIGINT)
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _refused(error: object) -> int:
  print(f"paxlike-convert: {one_line(error)}", file=sys.stderr)
  return 2


def _set_up():
  """Sets what JAX and its libraries read when they are imported, and how signals end the command.

  A conversion computes on CPUs alone. What drives accelerators would be loaded for nothing, and
  complain of what it lacks.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
  os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
  gpu_targets.leave_out()
  tpu_targets.settle()
  # Orbax logs what it also raises, with all its stack; asyncio what it need not.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  # Where writing fails, Orbax abandons what it has not begun.
  warnings.filterwarnings("ignore", r"coroutine .* was never awaited", RuntimeWarning)
  sys.unraisablehook = _report_unraisable
  for number in _STOPPING:
    if signal.getsignal(number) != signal.SIG_IGN:  # As nohup has it.
      signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None):
  """Ends the command by a KeyboardInterrupt, which has the signal's number."""
  place = frame
  while place is not None:
    if place.f_code.co_filename.startswith("<frozen importlib"):
      _stop_soon(number)  # Libraries in C++ abort when what they import is interrupted.
      return
    place = place.f_back
  for other in _STOPPING:
    signal.signal(other, signal.SIG_IGN)  # While what was written is removed.
  raise KeyboardInterrupt(number)


def _stop_soon(number: int):
  signal.signal(signal.SIGALRM, lambda _, frame: _stop(number, frame))
  signal.setitimer(signal.ITIMER_REAL, 0.05)


def _report_unraisable(error: Any):
  if isinstance(error.exc_value, KeyboardInterrupt):
    _stop_soon(error.exc_value.args[0])  # It came in a callback, which cannot pass it on.
  # When a write fails, TensorStore tells of the others to an event loop that is gone by then.
  elif str(error.exc_value) != "Event loop is closed":
    sys.__unraisablehook__(error)


def _run(argv: Sequence[str]) -> int:
  parser = console.Parser(prog="paxlike-convert", description=_HELP)
  parser.add_argument(
    "--from", dest="source", choices=("hf", "meta", "peft", "paxlike"), required=True
  )
  parser.add_argument("--path", type=_path, required=True, help="what is converted")
  parser.add_argument("--to", type=_path, required=True, metavar="DIR", help="a new folder")
  parser.add_argument("--base", type=_path, metavar="DIR", help="what adapters are for")
  parser.add_argument(
    "--adapter", action="store_true", help="from paxlike: the LoRA adapters, for PEFT"
  )
  parser.add_argument("--step", type=int, help="from paxlike: this checkpoint, not the newest")
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
  parser.add_argument(
    "--fdl_allow_modules",
    type=lambda text: tuple(text.split(",")),
    default=(),
    metavar="A,B",
    help="from paxlike and peft: modules outside of paxlike that the files of the run may use",
  )
  parser.add_argument("--dry_run", action="store_true", help="print what goes where, write nothing")
  options = parser.parse_args(argv)
  _check(options)
  source = _open(options)
  if options.dry_run:
    print(source.table())
    return 0
  source.convert(options.to, dtype=options.dtype)
  what = "an adapter for PEFT" if options.adapter else f"{len(source.matches)} weights"
  print(f"{options.to}: {what} in {options.dtype}")
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
    ("step", "--step", ("paxlike",)),
    ("fdl_allow_modules", "--fdl_allow_modules", ("paxlike", "peft")),
  ):
    value = getattr(options, name)
    is_given = value is not False and value not in (None, ())  # 0 is given, and equal to False.
    if is_given and options.source not in sources:
      raise UserError(f"{flag} goes with --from={' or --from='.join(sources)}: leave it out.")
  if options.source == "peft" and options.base is None:
    raise UserError("--from=peft needs --base=DIR, a run or converted model.")
  run_folder.check_new(options.to, flag="to")
  if options.source != "paxlike":
    run_folder.check_name(options.to, flag="to")


def _notes(options: argparse.Namespace, source: "Source | Run | Adapter | Trained") -> list[str]:
  """Returns what is to be known of what was written, a line each."""
  if options.source in ("hf", "meta"):
    return cast("Source", source).notes()
  from paxlike.convert import tokens

  return tokens.notes(options.to) if options.source == "paxlike" and not options.adapter else []


def _open(options: argparse.Namespace) -> "Source | Run | Adapter | Trained":
  # Imported here, after the flags have been found good.
  if options.source == "peft":
    from paxlike.convert.adapters import Adapter

    return Adapter(options.path, base=options.base, allow_modules=options.fdl_allow_modules)
  if options.source == "paxlike":
    from paxlike.convert.adapters import Trained
    from paxlike.convert.exporting import Run

    run = Run(
      options.path,
      step=options.step,
      base=options.base,
      merges=not options.adapter,
      allow_modules=options.fdl_allow_modules,
    )
    if options.adapter:
      return Trained(run)
    _ = run.tokenizer  # Or it is refused.
    return run
  from paxlike.convert.importing import Source

  return (
    Source.meta(options.path) if options.source == "meta" else Source.hugging_face(options.path)
  )


if __name__ == "__main__":
  sys.exit(main())
