# SPDX-License-Identifier: Apache-2.0
"""`paxlike-convert --from=hf --path=SOURCE --to=DIR`, and the way back by `--from=paxlike`."""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.convert.adapters import Adapter
  from paxlike.convert.exporting import Run
  from paxlike.convert.importing import Source

_HELP = """\
Converts models of Hugging Face (safetensors or .bin), and LLaMA as Meta gives it away (.pth), for
paxlike, and checkpoints of paxlike for Hugging Face, a tensor at a time. What is made for paxlike
is all that `paxlike --mode=decode --job_log_dir=DIR` needs.
"""


def main() -> int:
  """Entry point of the `paxlike-convert` command. Returns the exit status."""
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line. Returns the exit status: 0, or 2 for a user's mistake."""
  parser = argparse.ArgumentParser(prog="paxlike-convert", description=_HELP)
  parser.add_argument(
    "--from", dest="source", choices=("hf", "meta", "peft", "paxlike"), required=True
  )
  parser.add_argument("--path", type=pathlib.Path, required=True, help="what is converted")
  parser.add_argument("--to", type=pathlib.Path, required=True, metavar="DIR", help="a new folder")
  parser.add_argument("--base", type=pathlib.Path, metavar="DIR", help="from peft: what is adapted")
  parser.add_argument(
    "--adapter", action="store_true", help="from paxlike: the LoRA adapters, for PEFT"
  )
  parser.add_argument("--step", type=int, help="from paxlike: this checkpoint, not the newest")
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
  parser.add_argument("--dry_run", action="store_true", help="print what goes where, write nothing")
  options = parser.parse_args(argv)
  try:
    source = _open(options)
    if options.dry_run:
      print(source.table())
    elif options.adapter:
      from paxlike.convert import adapters

      adapters.export(cast("Run", source), options.to, dtype=options.dtype)
      print(f"{options.to}: an adapter for PEFT in {options.dtype}")
    else:
      source.convert(options.to, dtype=options.dtype)
      print(f"{options.to}: {len(source.matches)} weights in {options.dtype}")
      for line in cast("Source", source).notes() if options.source in ("hf", "meta") else ():
        print(line)
    return 0
  except UserError as error:
    print(f"paxlike-convert: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


def _open(options: argparse.Namespace) -> "Source | Run | Adapter":
  # Imported here, after the flags have been found good.
  if options.adapter and options.source != "paxlike":
    raise UserError("--adapter is what --from=paxlike can write.")
  if (options.base is not None) != (options.source == "peft"):
    raise UserError("--from=peft needs --base=DIR, a run or converted model; no other has it.")
  if options.source == "peft":
    from paxlike.convert.adapters import Adapter

    return Adapter(options.path, base=options.base)
  if options.source == "paxlike":
    from paxlike.convert.exporting import Run

    return Run(options.path, step=options.step)
  from paxlike.convert.importing import Source

  return (
    Source.meta(options.path) if options.source == "meta" else Source.hugging_face(options.path)
  )


if __name__ == "__main__":
  sys.exit(main())
