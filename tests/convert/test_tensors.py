# SPDX-License-Identifier: Apache-2.0
"""Files of tensors are those of the safetensors library; MXFP4 is that of transformers."""

import ml_dtypes
import numpy as np
import pytest

from paxlike.convert import quantized, tensors
from paxlike.convert.tensors import TensorFolder, TensorSpec

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")


def arrays():
  random = np.random.default_rng(0)
  result = {f"of.{d}": (9 * random.normal(size=(3, 5))).astype(d) for d in DTYPES}
  return result | {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float32)}


def specs(given):
  return {name: TensorSpec(value.shape, value.dtype) for name, value in given.items()}


def test_the_library_reads_what_is_written_and_the_way_back(tmp_path):
  import safetensors.numpy as safetensors

  given = {name: value for name, value in arrays().items() if "bfloat16" not in name}
  tensors.write(tmp_path, specs(given), given.__getitem__)
  for name, value in safetensors.load_file(tmp_path / "model.safetensors").items():
    np.testing.assert_array_equal(value, given[name])
  safetensors.save_file(given, tmp_path / "model.safetensors")
  folder = TensorFolder(tmp_path)
  assert folder.specs == specs(given)
  for name, value in given.items():
    np.testing.assert_array_equal(folder.read(name), value)


def test_shards_hold_all_and_are_no_larger_than_asked(tmp_path):
  given = arrays()
  tensors.write(tmp_path, specs(given), given.__getitem__, shard_bytes=150)
  folder = TensorFolder(tmp_path)
  assert folder.specs == specs(given)
  for name, value in given.items():
    assert folder.read(name).tobytes() == value.tobytes()
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3


@pytest.mark.slow
def test_mxfp4_is_read_as_transformers_reads_it():
  import torch
  from transformers.integrations import mxfp4

  random = np.random.default_rng(0)
  blocks = random.integers(0, 256, (3, 8, 2, 16), dtype=np.uint8)
  scales = random.integers(100, 150, (3, 8, 2), dtype=np.uint8)
  expected = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales))
  got = quantized._from_mxfp4(blocks, scales)
  assert got.dtype == ml_dtypes.bfloat16 and got.shape == (3, 64, 8)
  np.testing.assert_array_equal(got.astype(np.float32), expected.float().numpy())
