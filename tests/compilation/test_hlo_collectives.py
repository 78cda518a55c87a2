# SPDX-License-Identifier: Apache-2.0
"""What is read from programs, against what their text or their purpose says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from paxlike.compilation import hlo_collectives


@pytest.fixture
def mesh() -> Mesh:
  return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


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


def overlap(text: str, mesh: Mesh) -> list[tuple[str, bool, int, int]]:
  """Kind, whether in a loop, and the numbers of asynchronous and synchronous collectives."""
  return [row[:4] for row in hlo_collectives.overlap(text, mesh)]


GROUPS = "channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}"
START = f"%begin = f32[8] all-reduce-start(%x), {GROUPS}"


@pytest.mark.parametrize(
  ("lines", "is_async"),
  [
    ((START, "%y = f32[8] fusion(%x), calls=%f", "%end = f32[8] all-reduce-done(%begin)"), True),
    ((START, "%end = f32[8] all-reduce-done(%begin)", "%y = f32[8] fusion(%x)"), False),
    # What only names an array takes no time.
    ((START, "%y = f32[2,4] bitcast(%x)", "%end = f32[8] all-reduce-done(%begin)"), False),
    # So do others that wait, and what is there for order alone.
    (
      (
        START,
        "%p = u32[] partition-id()",
        "%z = f32[8] opt-barrier(%x)",
        "%end = f32[8] all-reduce-done(%begin)",
      ),
      False,
    ),
    # XLA for GPUs writes so what waits for its own end.
    (
      (
        f'{START}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}',
        "%y = f32[8] fusion(%x), calls=%f",
        "%end = f32[8] all-reduce-done(%begin)",
      ),
      False,
    ),
    ((f"%sum = f32[8] all-reduce(%x), {GROUPS}", "%y = f32[8] fusion(%x), calls=%f"), False),
  ],
)
def test_what_is_computed_between_start_and_end_makes_it_asynchronous(lines, is_async, mesh):
  text = "ENTRY %main (x: f32[8]) -> f32[8] {\n" + "".join(f"  {line}\n" for line in lines) + "}\n"
  assert overlap(text, mesh) == [("all-reduce", False, int(is_async), int(not is_async))]


@pytest.mark.parametrize("beside", ["f32[8] fusion(%i), calls=%f", "f32[8] copy(%i)"])
def test_what_a_loop_begins_its_next_run_may_end(beside, mesh):
  text = f"""\
%body (p: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {{
  %p = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %held = f32[8] get-tuple-element(%p), index=1
  %x = {beside}
  %end = f32[8] all-reduce-done(%held)
  %begin = f32[8] all-reduce-start(%x), {GROUPS}
  ROOT %t = (s32[], f32[8], f32[8]) tuple(%i, %begin, %end)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %loop = (s32[], f32[8], f32[8]) while(%x), condition=%cond, body=%body
}}
"""
  is_async = "fusion" in beside
  assert overlap(text, mesh) == [("all-reduce", True, int(is_async), int(not is_async))]


def test_one_collective_that_waits_does_not_make_another_asynchronous(mesh):
  text = f"""\
ENTRY %main (x: f32[8]) -> f32[8] {{
  {START}
  %sum = f32[8] all-reduce(%x), {GROUPS}
  %end = f32[8] all-reduce-done(%begin)
  %unfused = f32[8] custom-call(%x), custom_call_target="AsyncCollectiveStart"
}}
"""
  assert overlap(text, mesh) == [("all-reduce", False, 0, 2)]


# Of a step for v5e-256 that libtpu 0.0.42 compiled: what begins an all-gather, what multiplies
# beside it, and what ends it; a second one has nothing beside it.
SPLIT = """\
%fused_computation.438 (param_0: f32[2]) -> (f32[2], f32[8], s32[2]) {
  %all-gather.255 = f32[8]{0} all-gather(%param_0), channel_id=2, GROUPS, dimensions={0}
  ROOT %custom-call.51 = (f32[2]{0}, f32[8]{0}, s32[2]{0:S(4)}) custom-call(%all-gather.255), \
custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.538 (param_0: f32[2], param_1: f32[8]) -> (f32[2], f32[8]) {
  %all-gather.257 = f32[8]{0} all-gather(%param_0), channel_id=2, GROUPS, dimensions={0}
}

%fused_computation.440 (param_0: f32[2], param_1: f32[8]) -> f32[8] {
  %all-gather.259 = f32[8]{0} all-gather(%param_0), channel_id=2, GROUPS, dimensions={0}
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-gather.293 = f32[8]{0} all-gather(%x), channel_id=3, GROUPS, dimensions={0}
  %async-collective-start.9 = (f32[2]{0}, f32[8]{0}, s32[2]{0:S(4)}) fusion(%y), kind=kCustom, \
calls=%fused_computation.438
  %fusion.538 = (f32[2]{0}, f32[8]{0}) fusion(%a, %b), kind=kOutput, calls=\
%async_collective_fusion.538
  %async-collective-done.9 = f32[8]{0} fusion(%c, %d), kind=kCustom, calls=%fused_computation.440
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[]{:T(128)}, f32[8]{0}) while(%init), condition=%condition, body=%body
  %all-reduce.1 = f32[8]{0} all-reduce(%z), channel_id=4, GROUPS, to_apply=%add
}
"""


def test_a_tpu_multiplies_beside_a_split_collective(mesh):
  text = SPLIT.replace("GROUPS", "replica_groups={{0,2,4,6},{1,3,5,7}}")
  assert overlap(text, mesh) == [("all-gather", True, 1, 1), ("all-reduce", False, 0, 1)]


# Of a step for v5p-128 that libtpu 0.0.52 compiled, whose SparseCores gather: a custom-call-start
# loads a program into them, and a custom-call-update starts it.
ON_SPARSE_CORES = """\
%called_computation.34 (param_0: f32[2]) -> f32[8] {
  ROOT %all-gather.140 = f32[8]{0} all-gather(%param_0), channel_id=2, GROUPS, dimensions={0}
}, execution_thread="sparsecore"

%called_computation.35 (param_0: f32[8]) -> f32[2] {
  ROOT %reduce-scatter.28 = f32[2]{0} reduce-scatter(%param_0), channel_id=3, GROUPS, \
dimensions={0}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (x: f32[2]) -> f32[2] {
  %gather-start = ((), (), (s32[8192]{0:T(1024)})) custom-call-start(), \
async_execution_thread="sparsecore", called_computations={%called_computation.34}
  %early = f32[2]{0} fusion(%x), kind=kLoop, calls=%f
  %gather-update = ((f32[2]{0}), f32[8]{0}, (s32[8192]{0})) custom-call-update(%gather-start, %x)
  BETWEEN
  %gather-done = f32[8]{0} custom-call-done(%gather-update)
  %scatter-start = ((f32[8]{0}), f32[2]{0}, u32[]{:S(8)}) call-start(%gather-done), \
async_execution_thread="sparsecore", to_apply=%called_computation.35
  %late = f32[2]{0} fusion(%x), kind=kLoop, calls=%f
  ROOT %scatter-done = f32[2]{0} call-done(%scatter-start)
}
"""


@pytest.mark.parametrize(
  "beside", ["%with = f32[2]{0} fusion(%x), kind=kLoop, calls=%f", "%no = s32[] constant(0)"]
)
def test_sparse_cores_communicate_beside_computation(mesh, beside):
  text = ON_SPARSE_CORES.replace("GROUPS", "replica_groups={{0,2,4,6},{1,3,5,7}}")
  gathers_beside = int("fusion" in beside)
  assert overlap(text.replace("BETWEEN", beside), mesh) == [
    ("all-gather", False, gathers_beside, 1 - gathers_beside),
    ("reduce-scatter", False, 1, 0),
  ]
