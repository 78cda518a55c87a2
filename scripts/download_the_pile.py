# SPDX-License-Identifier: Apache-2.0
"""Makes the TFDS data set of the Pile (Gao et al., 2020).

Its own site has not had it since October 2023. What is fetched is the part of it without known
copyright claims, in the same 30 training files; whoever has the whole gives --from=FOLDER.
"""

import sys

from paxlike.cli.tfds_download import Download, main
from paxlike.data.seqio.tfds_writer import Schema

_URL = "https://huggingface.co/datasets/monology/pile-uncopyrighted/resolve/main/"
_FILES = [f"train/{number:02d}.jsonl.zst" for number in range(30)]

THE_PILE = Download(
  schema=Schema(
    name="the_pile:1.0.0",
    splits=("train", "validation", "test"),
    fields={"text": (("text",), str)},
  ),
  urls={_URL + name: name for name in [*_FILES, "val.jsonl.zst", "test.jsonl.zst"]},
)

if __name__ == "__main__":
  sys.exit(main(THE_PILE, sys.argv))
