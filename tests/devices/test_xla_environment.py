# SPDX-License-Identifier: Apache-2.0
"""XLA_FLAGS, as XLA itself judges it in processes of its own."""

import os
import subprocess
import sys

import pytest

from paxlike.devices import xla_environment
from paxlike.errors import UserError

KNOWN = "--xla_force_host_platform_device_count=3"
# Flags of Pax's recipes that XLA has removed.
REMOVED = ["--xla_gpu_enable_async_all_gather=true", "--xla_gpu_graph_level=0"]


@pytest.mark.parametrize(
  "setup", ["", "from paxlike.devices import jax_setup; jax_setup.set_up(); "]
)
def test_only_removed_flags_are_without_effect(setup):
  """Without the set-up, XLA ends the process."""
  done = subprocess.run(
    [sys.executable, "-c", f"{setup}import jax; print(jax.device_count())"],
    env=os.environ | {"XLA_FLAGS": f"{REMOVED[0]} {KNOWN} {REMOVED[1]}"},
    capture_output=True,
    text=True,
    check=False,
  )
  if setup:
    message = "XLA_FLAGS: this version of XLA does not take"
    assert done.stderr == f"paxlike: {message} {', '.join(REMOVED)}: left out\n"
    assert (done.returncode, done.stdout) == (0, "3\n")
  else:
    assert done.returncode != 0 and "Unknown flags in XLA_FLAGS" in done.stderr


@pytest.mark.parametrize(
  ("flags", "kept", "message"),
  [
    ("", "", ""),
    (" ", "", ""),
    (f" {KNOWN}  --xla_dump_to='a b' ", f"{KNOWN} --xla_dump_to='a b'", ""),
    (f"--xla_no='{KNOWN} x' {KNOWN}", KNOWN, f"not take --xla_no='{KNOWN} x': left out"),
    (f"--xla_gpu_autotune_level {KNOWN}", KNOWN, "take --xla_gpu_autotune_level: left out"),
    (f"{KNOWN} xla_no=1 {REMOVED[0]}", KNOWN, "xla_no=1 does not begin with --: ignored from"),
    (
      "--xla_gpu_enable_tritn_gemm=false",
      "",
      "--xla_gpu_enable_tritn_gemm=false (did you mean --xla_gpu_enable_triton_gemm?): left out",
    ),
  ],
)
def test_the_rest_is_kept(flags, kept, message, monkeypatch, tmp_path):
  monkeypatch.setenv("XLA_FLAGS", flags)
  assert message in xla_environment.settle() or not message
  assert os.environ["XLA_FLAGS"] == kept
  # What is kept needs no further change, and may stand in a file.
  (tmp_path / "flags").write_text(f"{kept}\n")
  monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
  assert xla_environment.settle() == "" and os.environ["XLA_FLAGS"] == kept


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ("--xla_gpu_autotune_level=much", "XLA_FLAGS: Couldn't interpret value much for flag xla_gpu"),
    ("xla_gpu_autotune_level=4", "a file of that name, which cannot be read: No such file"),
  ],
)
def test_what_xla_cannot_read_is_an_error(flags, message, monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", flags)
  with pytest.raises(UserError, match=message):
    xla_environment.settle()
