# SPDX-License-Identifier: Apache-2.0
"""Which collectives of a program wait, by its text."""

import pytest
from jax.sharding import Mesh

from paxlike.compilation import hlo_collectives


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
