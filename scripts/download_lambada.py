# SPDX-License-Identifier: Apache-2.0
"""Makes the TFDS data set of LAMBADA (Paperno et al., 2016) in OpenAI's variant: 5,153 passages."""

import sys

from paxlike.cli.tfds_download import Download, main
from paxlike.data.seqio.tfds_writer import Schema

_URL = "https://github.com/cybertronai/bflm/raw/master/lambada_test.jsonl"

LAMBADA = Download(
  schema=Schema(name="my_lambada:1.0.0", splits=("test",), fields={"text": (("text",), str)}),
  urls={_URL: "lambada_test.jsonl"},
  sha256={_URL: "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"},
)

if __name__ == "__main__":
  sys.exit(main(LAMBADA, sys.argv))
