# SPDX-License-Identifier: Apache-2.0
"""Devices that are only named."""

import os
import subprocess
import sys
import types

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from paxlike.devices import chips, topology
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("h300-1", "h200-N.*Did you mean h"),
    ("h200", "or v5e-256\\.$"),
    ("H200-4,", "or v5e-256\\.$"),
    ("h200-0", "h200-N"),
    ("h100-12", "nodes of 8"),
    ("gb200-6", "nodes of 4"),
    ("gb200-144", "the 72 GPUs of one rack"),
    ("v5x-256", "v5p-N, v6e-N.*Did you mean v"),
  ],
)
def test_what_is_no_topology_is_said(name, says):
  with pytest.raises(UserError, match=says), topology.target(name):
    pass
  assert topology.devices() == jax.devices()
  assert topology.parse("B200-8") == ("b200", 8)


def test_what_compiles_for_gpus_may_be_missing(monkeypatch):
  def missing(*unused, **also_unused):
    raise RuntimeError("Unknown backend cuda")

  monkeypatch.setattr(topologies, "get_topology_desc", missing)
  says = r"pip install 'paxlike\[cuda-aot\]'.*Unknown backend cuda"
  before = dict(vars(cudnn))
  with pytest.raises(UserError, match=says), topology.target("h200-1"):
    pass
  assert vars(cudnn) == before


def test_the_target_and_what_jax_asks_are_restored_also_after_an_error():
  before, here = dict(vars(cudnn)), topology.devices()
  with pytest.raises(ZeroDivisionError), topology.target("h200-2"):
    assert (len(topology.devices()), cudnn.check_compute_capability("10.0")) == (2, False)
    with topology.target("b200-8"):
      assert (len(topology.devices()), cudnn.check_compute_capability("10.0")) == (8, True)
      with topology.target(None):
        assert topology.devices() == here
    assert (len(topology.devices()), cudnn.check_compute_capability("10.0")) == (2, False)
    with pytest.raises(UserError), topology.target("h200-12"):
      pass
    assert len(topology.devices()) == 2
    assert vars(cudnn) != before
    raise ZeroDivisionError
  assert topology.devices() == here
  assert vars(cudnn) == before


@pytest.mark.parametrize(
  ("capability", "has"),
  [("9.0", True), ("8.6", True), ("12.0", True), ("7.5", False), ("gfx942", False), (None, False)],
)
def test_attention_by_cudnn_is_for_nvidias_gpus_from_ampere_on(capability, has):
  known = {} if capability is None else {"compute_capability": capability}
  assert topology.has_cudnn_attention(types.SimpleNamespace(**known)) is has


@pytest.mark.parametrize(("capability", "has"), [("9.0", True), ("8.6", False), ("gfx942", False)])
def test_attention_by_tokamax_is_for_nvidias_gpus_from_hopper_on(capability, has):
  device = types.SimpleNamespace(compute_capability=capability)
  assert topology.has_tokamax_attention(device) is has


@pytest.mark.parametrize(
  ("capability", "has"),
  [("9.0", True), ("8.9", True), ("10.0", True), ("8.6", False), ("7.5", False), ("gfx942", True)],
)
def test_fp8_is_for_all_but_nvidias_gpus_before_ada(capability, has):
  assert topology.has_fp8(types.SimpleNamespace(compute_capability=capability)) is has
  assert topology.has_fp8(types.SimpleNamespace())  # A CPU or TPU.


@pytest.mark.parametrize(
  ("capability", "has"), [("10.0", True), ("10.3", True), ("9.0", False), ("gfx942", True)]
)
def test_mxfp8_is_for_all_but_nvidias_gpus_before_blackwell(capability, has):
  assert topology.has_mxfp8(types.SimpleNamespace(compute_capability=capability)) is has
  assert topology.has_mxfp8(types.SimpleNamespace())  # A CPU or TPU.


@pytest.mark.parametrize(
  ("name", "count"),
  [("h200-1", 1), ("a100-4", 4), ("h100-64", 64), ("b300-16", 16), ("b200-8", 8), ("gb200-72", 72)],
)
def test_devices_are_as_many_and_known(name, count):
  with topology.target(name):
    found = topology.devices()
    assert len(found) == count
    chip = chips.find(found[0].device_kind)
    assert chip is not None and chip.bandwidth and chip.memory
    assert MeshSpec(ici=(-1, 1, 1)).build().size == count


def test_jax_takes_of_gpus_what_programs_are_said_to_have(monkeypatch):
  new, old = chips.SHARE_NAMES
  for name in (new, old):
    monkeypatch.setenv(name, "")  # Which is as none, and restored.
  topology.take_gpu_memory()
  assert float(os.environ[old]) == chips.gpu_share() and not os.environ[new]
  for name in (new, old):
    monkeypatch.setenv(old, "")
    monkeypatch.setenv(name, "0.6")
    topology.take_gpu_memory()
    assert chips.gpu_share() == 0.6
    # JAX refuses to be told twice.
    assert [other for other in (new, old) if os.environ[other]] == [name]
    monkeypatch.setenv(name, "")


def test_jax_takes_less_of_small_gpus_beside_many_communicators(monkeypatch, tmp_path):
  (tmp_path / "gpus" / "0000:07:00.0").mkdir(parents=True)
  said = tmp_path / "gpus" / "0000:07:00.0" / "information"
  monkeypatch.setattr(topology, "_DRIVER", tmp_path)
  line = MeshSpec(ici=(1, -1, 1)).num_communicators
  cube = MeshSpec(ici={"data": 2, "fsdp": 2, "tensor": 2}).num_communicators
  taken = {}
  for model in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA of tomorrow"):
    said.write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\n")
    for groups in (0, line, cube):
      for name in chips.SHARE_NAMES:
        monkeypatch.setenv(name, "")
      topology.take_gpu_memory(groups)
      taken[model.split("-")[0], groups] = float(os.environ[chips.SHARE_NAMES[1]])
  assert taken.pop(("NVIDIA A100", cube)) == 0.87
  assert set(taken.values()) == {0.92}


@pytest.mark.parametrize("text", ["most", "0", "nan"])
def test_what_is_no_share_is_said(monkeypatch, text):
  for name in chips.SHARE_NAMES:
    monkeypatch.setenv(name, text)
  with pytest.raises(UserError, match=rf"XLA_CLIENT_MEM_FRACTION={text}: expected a fraction"):
    topology.check_gpu_share()


# As where no plugin is installed, if there are arguments.
LEFT_OUT = """
import sys
if sys.argv[1:]:
  sys.modules["jax_plugins"] = None
from paxlike.devices import gpu_targets
gpu_targets.leave_out()
import jax
jax.devices()
with open("/proc/self/maps") as file:
  print("xla_cuda_plugin" in file.read())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("flags", [[], ["none"]])
def test_the_plugin_for_gpus_is_left_out_whether_there_is_one_or_not(flags):
  done = subprocess.run([sys.executable, "-c", LEFT_OUT, *flags], capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
