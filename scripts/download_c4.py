# SPDX-License-Identifier: Apache-2.0
"""Makes the TFDS data set of C4 (Raffel et al., 2020), English: 305 GB to fetch."""

import sys

from paxlike.cli.tfds_download import Download, main
from paxlike.data.seqio.tfds_writer import Schema

_URL = "https://huggingface.co/datasets/allenai/c4/resolve/main/en/"
_FILES = [f"c4-train.{number:05d}-of-01024.json.gz" for number in range(1024)]
_FILES += [f"c4-validation.{number:05d}-of-00008.json.gz" for number in range(8)]

C4 = Download(
  schema=Schema(
    name="c4/en:3.0.1", splits=("train", "validation"), fields={"text": (("text",), str)}
  ),
  urls={_URL + name: name for name in _FILES},
)

if __name__ == "__main__":
  sys.exit(main(C4, sys.argv))
