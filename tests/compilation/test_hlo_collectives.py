# SPDX-License-Identifier: Apache-2.0
"""What is read from programs, against what their text or their purpose says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.compilation import hlo_collectives

FLOATS = 1024
NBYTES = 4 * FLOATS


@pytest.mark.parametrize(
  ("function", "axes", "expected"),
  [
    (lambda x: jax.lax.psum(x, "data"), ("data",), ("all-reduce", 2 * 3 / 4 * NBYTES)),
    (
      lambda x: jax.lax.psum(x, ("data", "tensor")),
      ("data", "tensor"),
      ("all-reduce", 2 * 7 / 8 * NBYTES),
    ),
    (lambda x: jax.lax.all_gather(x, "tensor"), ("tensor",), ("all-gather", NBYTES)),
    (
      lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
      ("data",),
      ("reduce-scatter", 3 / 4 * NBYTES),
    ),
    (
      lambda x: jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]),
      ("tensor",),
      ("collective-permute", NBYTES),
    ),
  ],
)
def test_bytes_are_those_that_the_algorithm_must_send(mesh, function, axes, expected):
  every = PartitionSpec()
  local = jax.shard_map(function, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
  where = NamedSharding(mesh, every)
  program = hlo.text(local, jax.ShapeDtypeStruct((FLOATS,), "float32", sharding=where))
  [found] = hlo_collectives.collectives(program, mesh)
  kind, nbytes = expected
  assert found == (kind, axes, 1, nbytes)


def test_each_exchange_of_a_function_for_one_device_counts(mesh):
  """JAX gives all of them one channel."""

  def local(x):
    y = jax.lax.psum(jnp.sin(x), "data")
    y = jax.lax.ppermute(jnp.sin(y), "tensor", [(0, 1), (1, 0)])
    return jax.lax.all_gather(jnp.sin(jax.lax.psum(jnp.sin(y), "data")), "data")

  every = PartitionSpec()
  function = jax.shard_map(local, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
  where = NamedSharding(mesh, every)
  program = hlo.text(function, jax.ShapeDtypeStruct((FLOATS,), "float32", sharding=where))
  found = hlo_collectives.collectives(program, mesh)
  assert {(one.kind, one.axes): (one.count, one.nbytes) for one in found} == {
    ("all-reduce", ("data",)): (2, 2 * 2 * 3 / 4 * NBYTES),
    ("collective-permute", ("tensor",)): (1, NBYTES),
    ("all-gather", ("data",)): (1, 3 * NBYTES),
  }


def test_what_branches_do_counts(mesh):
  def local(x):
    return jax.lax.cond(x[0] > 0, lambda x: jax.lax.psum(x, "data"), lambda x: 2 * x, x)

  every = PartitionSpec()
  function = jax.shard_map(local, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
  where = NamedSharding(mesh, every)
  program = hlo.text(function, jax.ShapeDtypeStruct((FLOATS,), "float32", sharding=where))
  [found] = hlo_collectives.collectives(program, mesh)
  assert found.kind == "all-reduce"


def test_what_a_loop_does_counts_as_often_as_it_runs(mesh):
  def body(x, _):
    return jax.lax.psum(jnp.sin(x), "data"), None

  def nested(x, _):
    return jax.lax.scan(body, x, None, length=3)[0], None

  every = PartitionSpec()
  loop = functools.partial(jax.lax.scan, nested, xs=None, length=5)
  local = jax.shard_map(
    lambda x: loop(x)[0], mesh=mesh, in_specs=every, out_specs=every, check_vma=False
  )
  where = NamedSharding(mesh, every)
  program = hlo.text(local, jax.ShapeDtypeStruct((FLOATS,), "float32", sharding=where))
  [found] = hlo_collectives.collectives(program, mesh)
  assert found.count == 15
  assert found.nbytes == 15 * 2 * 3 / 4 * NBYTES


# As XLA for TPUs writes: no trip counts, parts of one collective in several computations.
TPU = """\
%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(32)
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

%part.1 (p: f32[2]) -> f32[8] {
  ROOT %all-gather.1 = f32[8]{0:T(128)} all-gather(%p), channel_id=7, GROUPS, dimensions={0}
}

%part.2 (p: f32[2]) -> f32[8] {
  ROOT %all-gather.2 = f32[8]{0:T(128)} all-gather(%p), channel_id=7, GROUPS, dimensions={0}
}

%all-reduce-scatter.3 (p: f32[16]) -> f32[4] {
  %all-reduce.9 = f32[16]{0:T(128)} all-reduce(%p), channel_id=8, GROUPS, to_apply=%add
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %one = f32[8]{0:T(128)} fusion(%x), kind=kCustom, calls=%part.1
  %two = f32[8]{0:T(128)} fusion(%one), kind=kCustom, calls=%part.2
  %three = f32[4]{0:T(128)} fusion(%two), kind=kCustom, calls=%all-reduce-scatter.3
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%init), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(
  ("groups", "axes"),
  [
    ("replica_groups=mesh['a'=4,'b'=2] {'a'}", ("data",)),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",)),
    ("replica_groups=[2,4]<=[4,2]T(1,0)", ("data",)),
    ("replica_groups={{0,2,4,6},{1,3,5,7}}", ("data",)),
    ("replica_groups=[2,4]<=[8]", ("data", "tensor")),
  ],
)
def test_the_text_of_a_program_for_tpus(mesh, groups, axes):
  found = hlo_collectives.collectives(TPU.replace("GROUPS", groups), mesh)
  scattered, gathered = 32 * 64 * 3 / 4, 32 * 32 * 3 / 4
  assert found == [
    ("reduce-scatter", axes, 32, scattered),
    ("all-gather", axes, 32, gathered),
  ]


# As XLA for GPUs may write a loop: constants are inside fusions, or given to them.
FUSED = """\
%limits (p: s32[]) -> pred[] {
  %limit = s32[] constant(57)
  ROOT %lt = pred[] compare(%p, %limit), direction=LT
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %fusion = pred[] fusion(%i), kind=kLoop, calls=%limits
}

ADD

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %three = s32[] constant(3)
  %next = s32[] NEXT
  %whole = f32[8]{0} all-gather(%x), channel_id=7, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %tuple = (s32[], f32[8]) tuple(%next, %whole)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body
}
"""


INSIDE = """\
%add (x: f32[8], p: s32[]) -> s32[] {
  %p = s32[] parameter(2)
  %step = s32[] constant(STEP)
  ROOT %sum = s32[] add(%p, %step)
}
"""
GIVEN = """\
%add (p: s32[], q: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %sum = s32[] add(%p, %q)
}
"""
TUPLE = """\
%add (p: s32[]) -> (f32[8], s32[]) {
  %p = s32[] parameter(0)
  %step = s32[] constant(3)
  %sum = s32[] add(%p, %step)
  ROOT %both = (f32[8], s32[]) tuple(%x, %sum)
}
"""


@pytest.mark.parametrize(
  ("add", "call", "step"),
  [
    (INSIDE.replace("STEP", "1"), "fusion(%x, %y, %i), kind=kLoop, calls=%add", 1),
    (INSIDE.replace("STEP", "3"), "fusion(%x, %y, %i), kind=kLoop, calls=%add", 3),
    (GIVEN, "fusion(%i, %three), kind=kLoop, calls=%add", 3),
    (TUPLE, "get-tuple-element(%outputs), index=1", 3),
    ("", "add(%i, %three)", 3),
    ("", "fusion(%i), kind=kLoop, calls=%missing", 1),
  ],
)
def test_the_count_of_a_loop_may_be_in_fusions(mesh, add, call, step):
  text = FUSED.replace("ADD", add).replace("NEXT", call)
  outputs = "  %outputs = (f32[8], s32[]) fusion(%i), kind=kLoop, calls=%add\n"
  text = text.replace("  %next", outputs + "  %next") if "%outputs" in call else text
  [found] = hlo_collectives.collectives(text, mesh)
  assert found.count == 57 / step


def test_groups_that_are_not_understood_are_no_other_groups(mesh):
  with pytest.raises(ValueError, match="unknown notation"):
    hlo_collectives.collectives(TPU.replace("GROUPS", "replica_groups=<something new>"), mesh)


def test_a_device_alone_exchanges_nothing(mesh):
  assert hlo_collectives.collectives(TPU.replace("GROUPS", "replica_groups={{0},{1}}"), mesh) == []


@pytest.mark.parametrize(
  ("line", "kind", "nbytes"),
  [
    ("(f32[2], f32[8]) all-gather-start(%x)", "all-gather", 32 * 3 / 4),
    ("((f32[8]), f32[2]) reduce-scatter-start(%x)", "reduce-scatter", 32 * 3 / 4),
    ("((f32[8]), f32[8]) all-to-all-start(%x)", "all-to-all", 32 * 3 / 4),
    ("(f32[8], f32[4]) all-reduce-start(%x, %y)", "all-reduce", 2 * 48 * 3 / 4),
    # As JAX 0.12 has XLA write it for GPUs: the operands before the results.
    ("((f32[8]), f32[8]) all-reduce-start(%x)", "all-reduce", 2 * 32 * 3 / 4),
    ("(f32[8], f32[8], u32[], u32[]) collective-permute-start(%x)", "collective-permute", 32),
  ],
)
def test_what_is_begun_counts_and_not_its_end(line, kind, nbytes, mesh):
  groups = "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}"
  end = f"  %end = f32[8] {kind}-done(%begin)\n"
  text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %begin = {line}, {groups}\n{end}}}\n"
  assert hlo_collectives.collectives(text, mesh) == [(kind, ("data",), 1, nbytes)]


@pytest.mark.parametrize(
  ("pairs", "axes"),
  [("{{0,0},{1,3},{3,5}}", ("data",)), ("{{0,1},{2,3}}", ("tensor",))],
)
def test_pairs_tell_their_axes(pairs, axes, mesh):
  line = f"%p = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={pairs}"
  text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {line}\n}}\n"
  [found] = hlo_collectives.collectives(text, mesh)
  assert found.axes == axes
  assert np.isclose(found.nbytes, 32)
