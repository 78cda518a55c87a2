# SPDX-License-Identifier: Apache-2.0
"""When instructions ran, as traces of CPUs (real ones) and GPUs (in XLA's form) have it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paxlike.compilation.hlo_text import computations
from paxlike.errors import UserError
from paxlike.profiling import trace
from paxlike.training import profiler

# As XLA's cupti_collector.cc writes it: kernels in lines of streams, `hlo_op` and `hlo_module` by
# reference. The last line is one of those that xprof derives.
GPU = """
planes { name: "/device:GPU:1"
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "gemm.1" } }
  stat_metadata { key: 4 value { id: 4 name: "jit_train_step" } }
  stat_metadata { key: 5 value { id: 5 name: "jit_other" } }
  stat_metadata { key: 6 value { id: 6 name: "all-gather-start" } }
  event_metadata { key: 1 value { id: 1 name: "sm90_xmma_gemm" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllGather" } }
  lines { id: 7 name: "Stream #7(Kernel)" timestamp_ns: 1000000000
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000
      stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 4 } }
    events { metadata_id: 1 offset_ps: 9000000 duration_ps: 2000000
      stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 5 } } }
  lines { id: 9 name: "Stream #9(Kernel)" timestamp_ns: 1000000000
    events { metadata_id: 2 offset_ps: 2000000 duration_ps: 5000000
      stats { metadata_id: 1 ref_value: 6 } stats { metadata_id: 2 ref_value: 4 } }
    events { metadata_id: 2 offset_ps: 8000000 duration_ps: 5000000 } }
  lines { id: 11 name: "XLA Ops" timestamp_ns: 1000000000
    events { metadata_id: 1 offset_ps: 1000000 duration_ps: 2000000
      stats { metadata_id: 1 ref_value: 3 } stats { metadata_id: 2 ref_value: 4 } } }
}
"""


def write(text: str, folder: Any):
  kind: Any = jax.profiler.ProfileData
  place = folder / "plugins" / "profile" / "2026"
  place.mkdir(parents=True)
  (place / "host.xplane.pb").write_bytes(kind.text_proto_to_serialized_xspace(text))


def test_kernels_of_gpus_are_those_of_streams(tmp_path):
  write(GPU, tmp_path)
  found = trace.read(tmp_path, "jit_train_step")
  assert [(one.name, one.device) for one in found] == [("gemm.1", 1), ("all-gather-start", 1)]
  assert [one.start for one in found] == pytest.approx([1.000001, 1.000002])
  assert [one.end - one.start for one in found] == pytest.approx([2e-6, 5e-6], rel=1e-3)


def test_a_program_without_kernels_is_an_error(tmp_path):
  with pytest.raises(UserError, match=r"has no kernels of jit_f\."):
    trace.read(tmp_path, "jit_f")
  write(GPU, tmp_path)
  with pytest.raises(UserError, match=r"NVreg_RestrictProfilingToAdminUsers"):
    trace.read(tmp_path, "jit_f")


def test_every_thunk_of_a_cpu_is_seen_as_often_as_it_runs(tmp_path):
  def f(x):
    return jax.lax.fori_loop(0, 5, lambda i, y: jnp.tanh(y @ y), x)

  x = jnp.ones((256, 256)) / 256
  program = jax.jit(f).lower(x).compile()
  program(x).block_until_ready()
  with profiler.trace(tmp_path):
    for _ in range(2):
      program(x).block_until_ready()
  text = program.as_text() or ""
  module = re.match(r"HloModule ([\w.\-]+)", text)
  assert module
  found = trace.read(tmp_path, module[1])
  known = {one.name for lines in computations(text).values() for one in lines}
  assert {one.name for one in found} <= known
  assert all(one.end >= one.start for one in found)
  dots = [one for one in found if one.name.startswith(("dot", "ynn"))]
  assert len(dots) == 2 * 5
  # Also if a thunk is asynchronous: a matmul takes most of the time of its loop.
  loops = [one for one in found if one.name.startswith("while")]
  assert len(loops) == 2
