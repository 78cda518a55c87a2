# SPDX-License-Identifier: Apache-2.0
"""Makes the TFDS data set of BoolQ (Clark et al., 2019) as SuperGLUE has it.

The test split, which has no labels, is left out.
"""

import sys

from paxlike.cli.tfds_download import Download, main
from paxlike.data.seqio.tfds_writer import Schema

BOOLQ = Download(
  schema=Schema(
    name="super_glue/boolq:1.0.2",
    splits=("train", "validation"),
    passed_over=("test",),
    fields={
      "passage": (("passage",), str),
      "question": (("question",), str),
      "label": (("label", "answer"), int),
    },
  ),
  urls={"https://dl.fbaipublicfiles.com/glue/superglue/data/v2/BoolQ.zip": "BoolQ.zip"},
)

if __name__ == "__main__":
  sys.exit(main(BOOLQ, sys.argv))
