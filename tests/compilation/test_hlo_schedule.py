# SPDX-License-Identifier: Apache-2.0
"""What runs beside a collective, and which of its time that hides."""

from paxlike.compilation import hlo_schedule

PROGRAM = """HloModule program, is_scheduled=true

%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %all-gather-start = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1}}
  %fusion.1 = f32[8]{0} fusion(%x), kind=kLoop, calls=%f
  %all-gather-done = f32[8]{0} all-gather-done(%all-gather-start)
  ROOT %t = (f32[8]{0}) tuple(%all-gather-done)
}

%wrapped (q: f32[8]) -> f32[4] {
  %q = f32[8]{0} parameter(0)
  ROOT %reduce-scatter = f32[4]{0} reduce-scatter(%q), replica_groups={{0,1}}, to_apply=%sum
}

ENTRY %main (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  %t = (f32[8]{0}) tuple(%x)
  %while = (f32[8]{0}) while(%t), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %y = f32[8]{0} get-tuple-element(%while), index=0
  %reduce-scatter-start = ((f32[8]{0}), f32[4]{0}) async-start(%y), calls=%wrapped
  %fusion.2 = f32[8]{0} fusion(%y), kind=kLoop, calls=%f
  %all-reduce-start = f32[8]{0} all-reduce-start(%fusion.2), to_apply=%sum
  %reduce-scatter-done = f32[4]{0} async-done(%reduce-scatter-start)
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %all-reduce.2 = f32[8]{0} all-reduce(%all-reduce-done), to_apply=%sum
  ROOT %z = f32[4]{0} fusion(%all-reduce.2, %reduce-scatter-done), kind=kLoop, calls=%f
}
"""


def test_collectives_are_found_with_what_runs_beside_them():
  assert hlo_schedule.transfers(PROGRAM) == [
    ("all-gather-start", 3, ("fusion.1",)),
    ("reduce-scatter-start", 1, ("fusion.2", "all-reduce-start")),
    ("all-reduce-start", 1, ("reduce-scatter-done",)),
    ("all-reduce.2", 1, ()),
  ]


def test_computation_hides_collectives_and_collectives_do_not():
  costs = {
    "all-gather-start": 10.0,
    "fusion.1": 4.0,
    "reduce-scatter-start": 5.0,
    "fusion.2": 7.0,
    "all-reduce-start": 3.0,
    "all-reduce.2": 2.0,
  }
  assert hlo_schedule.exposed(PROGRAM, costs) == (3 * 6.0 + 0.0 + 3.0 + 2.0, 3 * 10 + 5 + 3 + 2)
