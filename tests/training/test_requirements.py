# SPDX-License-Identifier: Apache-2.0
"""What a model names and its devices lack is said when a trainer meets them, not before."""

import fiddle as fdl
import pytest

from paxlike import registry
from paxlike.devices import topology
from paxlike.errors import UserError
from paxlike.training import preflight


def check(where, knobs):
  graph = registry.find("Gpt3_52k")(**knobs).trainer()
  with topology.target(where):
    preflight.check_setup(fdl.build(graph), training=True)


@pytest.mark.parametrize(
  ("where", "knobs", "says"),
  [
    (None, {"ATTENTION_KERNEL": "cudnn"}, r"cudnn needs .* is cpu: use auto .*kernel=\"auto\""),
    (None, {"ATTENTION_KERNEL": "splash"}, r"splash needs TPUs, but the device is cpu"),
    ("h200-1", {"ATTENTION_KERNEL": "splash"}, r"splash needs TPUs, but the device is NVIDIA H200"),
    ("a100-1", {"ATTENTION_KERNEL": "tokamax"}, r"tokamax needs NVIDIA GPUs from Hopper on"),
    ("a100-1", {"USE_FP8": True}, r"QUANTIZATION=fp8 .*USE_FP8.* from Ada on.* is NVIDIA A100"),
    ("a100-1", {"USE_FP8": True, "ENABLE_TE": True}, r"=fp8 .*needs NVIDIA GPUs from Ada on"),
    ("a100-1", {"QUANTIZATION": "fp8_delayed"}, r"=fp8_delayed .* A100: use QUANTIZATION=none"),
    ("h200-1", {"QUANTIZATION": "mxfp8"}, r"mxfp8 needs .* Blackwell on.*: use fp8"),
    (None, {"ENABLE_TE": True}, r"ENABLE_TE \(transformer_engine\) needs an NVIDIA GPU .* is cpu"),
    ("h200-8", {"ENABLE_TE": True}, r"ENABLE_TE .*supports one GPU, but there are 8"),
  ],
)  # fmt: skip
def test_what_devices_lack_is_refused(where, knobs, says):
  with pytest.raises(UserError, match=says):
    check(where, knobs)


@pytest.mark.parametrize(
  ("where", "knobs"),
  [
    ("a100-1", {"QUANTIZATION": "int8"}),
    ("h200-1", {"USE_FP8": True}),
    (None, {"USE_FP8": True}),
    ("b200-1", {"QUANTIZATION": "mxfp8"}),
    (None, {"QUANTIZATION": "mxfp8"}),
  ],
)
def test_what_devices_have_is_taken(where, knobs):
  check(where, knobs)
