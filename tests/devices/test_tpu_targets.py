# SPDX-License-Identifier: Apache-2.0
"""TPUs that are only named."""

import importlib.util
import math

import jax
import pytest
from helpers import hlo
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.compilation import hlo_collectives
from paxlike.devices import chips, topology, tpu_targets
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError

# The shapes that Google sells under these names.
SHAPES = {
  ("v5e", 1): (1, 1),
  ("v5e", 4): (2, 2),
  ("v5e", 8): (2, 4),
  ("v5e", 32): (4, 8),
  ("v5e", 256): (16, 16),
  ("v6e", 128): (8, 16),
  ("v4", 8): (2, 2, 1),
  ("v4", 128): (4, 4, 4),
  ("v4", 8192): (16, 16, 16),
  ("v5p", 8): (2, 2, 1),
  ("v5p", 16): (2, 2, 2),
  ("v5p", 64): (2, 4, 4),
  ("v5p", 128): (4, 4, 4),
  ("v5p", 384): (4, 4, 12),
  ("v5p", 768): (4, 8, 12),
  ("v5p", 2048): (8, 8, 16),
  ("v5p", 12288): (16, 16, 24),
  ("v7x", 2): (1, 1, 1),
  ("v7x", 8): (2, 2, 1),
  ("v7x", 128): (4, 4, 4),
}

# Links that close a dim, as MaxText's table of accelerators has them, which JAX's compiler is given
# (src/maxtext/utils/accelerator_to_spec_map.py, August 2026).
WRAPS = {
  ("v5e", 8): "...",
  ("v5e", 64): "...",
  ("v5e", 128): ".o.",
  ("v5e", 256): "oo.",
  ("v6e", 128): ".o.",
  ("v6e", 256): "oo.",
  ("v4", 8): "...",
  ("v4", 128): "ooo",
  ("v5p", 8): "...",
  ("v5p", 64): "...",
  ("v5p", 128): "ooo",
  ("v5p", 384): "ooo",
  ("v5p", 12288): "ooo",
  ("v7x", 64): "...",
  ("v7x", 128): "ooo",
}


@pytest.mark.parametrize("name", SHAPES, ids=str)
def test_slices_have_the_shapes_that_are_sold(name):
  kind, count = name
  assert tpu_targets.shape(kind, count) == SHAPES[name]
  assert math.prod(SHAPES[name]) * tpu_targets.KINDS[kind].units == count


@pytest.mark.parametrize("name", WRAPS, ids=str)
def test_slices_are_closed_to_rings_where_links_are(name):
  wrap = tpu_targets.wrap(name[0], tpu_targets.shape(*name))
  assert wrap == tuple(letter == "o" for letter in WRAPS[name])


def test_the_compiler_knows_of_the_links():
  """Over 64 chips without rings it gathers by an all-reduce, which sends twice as much."""
  with topology.target("v5p-128"):
    mesh = MeshSpec(ici=(1, 64, 1)).build()
  cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
  x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=cut)
  program = hlo.text(jax.jit(lambda x: 2 * x, out_shardings=whole), x)
  [found] = hlo_collectives.collectives(program, mesh)
  assert (found.kind, found.nbytes) == ("all-gather", 63 / 64 * 2 * 4096**2)


@pytest.mark.parametrize(
  "name", ["v5e-512", "v5e-2", "v5e-12", "v5p-2", "v5p-4", "v5p-7", "v5p-17920", "v6e-3", "v7x-4"]
)
def test_there_are_no_others(name):
  with pytest.raises(UserError, match=f"--topology={name}: there is no such slice"):
    topology.parse(name)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "slices", "count", "kind"),
  [
    ("v5e-1", 1, 1, "v5 lite"),
    ("v5e-16", 2, 32, "v5 lite"),
    ("v4-8", 1, 4, "v4"),
    ("v5p-8", 1, 4, "v5"),
    ("v6e-8", 1, 8, "v6"),
    # Two devices a chip.
    ("v7x-2", 1, 2, "TPU7x"),
    ("v7x-8", 2, 16, "TPU7x"),
  ],
)
def test_chips_are_as_many_and_known(name, slices, count, kind):
  with topology.target(name, slices=slices):
    found = topology.devices()
  assert len(found) == count
  assert kind in found[0].device_kind
  assert {getattr(chip, "slice_index", 0) or 0 for chip in found} == set(range(slices))
  known = chips.find(found[0].device_kind)
  assert known is not None and known.memory and known.bandwidth


def test_a_compiler_that_is_missing_or_refuses_is_told(monkeypatch):
  def refuse(*unused, **also_unused):
    raise RuntimeError("not today")

  monkeypatch.setattr(topologies, "get_topology_desc", refuse)
  failed = pytest.raises(UserError, match="--topology=v5e-4: the TPU compiler failed: not today")
  with failed, topology.target("v5e-4"):
    pass
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  missing = pytest.raises(UserError, match=r"pip install 'paxlike\[tpu-aot\]' \(not today\)")
  with missing, topology.target("v5e-4"):
    pass


def test_slices_are_of_tpus():
  refused = pytest.raises(UserError, match="--slices=2: only TPUs come in slices")
  with refused, topology.target("h100-8", slices=2):
    pass
