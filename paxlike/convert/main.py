# SPDX-License-Identifier: Apache-2.0
"""`paxlike-convert --from=hf --path=SOURCE --to=DIR`, and the way back by `--from=paxlike`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from paxlike.errors import UserError

_HELP = """\
Converts models of Hugging Face (safetensors) for paxlike, and checkpoints of paxlike for Hugging
Face, a tensor at a time. DIR then holds all that `paxlike --mode=decode --job_log_dir=DIR` needs.
"""


def main() -> int:
  """Entry point of the `paxlike-convert` command. Returns the exit status."""
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line. Returns the exit status: 0, or 2 for a user's mistake."""
  parser = argparse.ArgumentParser(prog="paxlike-convert", description=_HELP)
  parser.add_argument("--from", dest="source", choices=("hf", "paxlike"), required=True)
  parser.add_argument("--path", type=pathlib.Path, required=True, help="what is converted")
  parser.add_argument("--to", type=pathlib.Path, required=True, metavar="DIR", help="a new folder")
  parser.add_argument("--step", type=int, help="from paxlike: this checkpoint, not the newest")
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
  parser.add_argument("--dry_run", action="store_true", help="print what goes where, write nothing")
  options = parser.parse_args(argv)
  try:
    if options.source == "hf":
      from paxlike.convert import importing

      source = importing.Source(options.path)
    else:
      from paxlike.convert import exporting

      source = exporting.Run(options.path, step=options.step)
    if options.dry_run:
      print(source.table())
    else:
      source.convert(options.to, dtype=options.dtype)
      print(f"{options.to}: {len(source.matches)} weights in {options.dtype}")
    return 0
  except UserError as error:
    print(f"paxlike-convert: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


if __name__ == "__main__":
  sys.exit(main())
