# SPDX-License-Identifier: Apache-2.0
"""Files of tensors are those of the safetensors library; MXFP4 is that of transformers."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from helpers import tiny_llama
from helpers.damaged_files import torch_file

from paxlike.convert import quantized, safetensors_files
from paxlike.convert.importing import Source
from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorFolder, TensorSpec

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
  safetensors_files.write(tmp_path, specs(given), given.__getitem__)
  for name, value in safetensors.load_file(tmp_path / "model.safetensors").items():
    np.testing.assert_array_equal(value, given[name])
  safetensors.save_file(given, tmp_path / "model.safetensors")
  folder = TensorFolder(tmp_path)
  assert folder.specs == specs(given)
  for name, value in given.items():
    np.testing.assert_array_equal(folder.read(name), value)


def test_shards_hold_all_and_are_no_larger_than_asked(tmp_path):
  given = arrays()
  safetensors_files.write(tmp_path, specs(given), given.__getitem__, shard_bytes=150)
  folder = TensorFolder(tmp_path)
  assert folder.specs == specs(given)
  for name, value in given.items():
    assert folder.read(name).tobytes() == value.tobytes()
  files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
  assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3


# In the order of transformers.
PLACES = (
  "model.safetensors",
  "model.safetensors.index.json",
  "pytorch_model.bin",
  "pytorch_model.bin.index.json",
)


def in_every_place(folder):
  """Writes a model of each kind, whose last norm has the place's number."""
  given = tiny_llama.values(tiny_llama.shapes())
  tiny_llama.write(folder, given)
  for number, place in enumerate(PLACES):
    given["model.norm.weight"] = np.full(tiny_llama.DIM, number, np.float32)
    name = place if "index" not in place else place.replace(".index.json", "").replace("l.", "l-1.")
    if "safetensors" in name:
      safetensors_files.write_file(folder / name, specs(given), given.__getitem__)
    else:
      torch_file(folder / name, given)
    if "index" in place:
      index = {"metadata": {}, "weight_map": dict.fromkeys(given, name)}
      (folder / place).write_text(json.dumps(index))


def test_of_several_files_of_weights_those_of_transformers_are_read(tmp_path):
  in_every_place(tmp_path)
  for number, place in enumerate(PLACES):
    read = Source.hugging_face(tmp_path)._tensors.read("model.norm.weight")
    assert read[0] == number
    (tmp_path / place).unlink()


@pytest.mark.slow
def test_transformers_reads_them_in_that_order(tmp_path):
  import transformers

  in_every_place(tmp_path)
  for number, place in enumerate(PLACES):
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.model.norm.weight[0].item() == number
    (tmp_path / place).unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("value", "dtype", "fits"),
  [
    (65_519, "float16", True),
    (65_521, "float16", False),
    (-1e5, "float16", False),
    (np.inf, "float16", True),
    (np.nan, "float16", True),
    (3.38e38, "bfloat16", True),
    (3.402e38, "bfloat16", False),
    (3.402e38, "float32", True),
  ],
)
def test_a_number_beyond_the_range_of_a_dtype_is_refused(tmp_path, capsys, value, dtype, fits):
  given = tiny_llama.values(tiny_llama.shapes())
  given["model.norm.weight"][3] = value
  theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
  tiny_llama.write(theirs, given)
  first = ["--from=hf", f"--path={theirs}", f"--to={ours}"]
  for flags, name in (
    (first, "norm.scale"),
    (["--from=paxlike", f"--path={ours}", f"--to={back}"], "model.norm.weight"),
  ):
    assert run([*flags, f"--dtype={dtype}"]) == (0 if fits else 2)
    error = capsys.readouterr().err
    if not fits:
      assert f"{name} has {float(np.float32(value)):g}, which is beyond the range of" in error
      assert error.count("\n") == 1 and not list(tmp_path.glob(".*"))
    shutil.rmtree(ours, ignore_errors=True)
    if name == "norm.scale":
      assert run(first) == 0


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
