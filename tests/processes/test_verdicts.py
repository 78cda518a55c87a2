# SPDX-License-Identifier: Apache-2.0
"""Why the watch ends a job, and what status.json says of it."""

import json

import jax
import pytest
from etils import epath

from paxlike.errors import UserError
from paxlike.processes import verdicts


@pytest.mark.parametrize(
  ("module", "kind", "text", "is_of_jax"),
  [
    ("any", jax.errors.JaxRuntimeError, "INTERNAL: Gloo AllGather failed", True),
    ("jax.experimental.multihost_utils", ValueError, "UNKNOWN: Gloo AllGather failed", True),
    ("jax._src.array", ValueError, "shapes do not match", False),
    ("orbax.checkpoint", ValueError, "UNAVAILABLE: Error writing: No space left", False),
  ],
)
def test_errors_of_jax_are_found_behind_others(module, kind, text, is_of_jax):
  with pytest.raises(UserError) as found:
    try:
      exec("raise kind(text)", {"__name__": module, "kind": kind, "text": text})
    except kind as error:
      raise UserError("could not be read") from error
  assert verdicts.is_of_jax(found.value) is is_of_jax


@pytest.mark.parametrize(
  ("before", "leader", "after"),
  [
    ({"state": "running", "host": "a", "pid": 1}, ("a", 1), "lost"),
    ({"state": "running", "host": "a", "pid": 2}, ("a", 1), "running"),
    ({"state": "finished", "host": "a", "pid": 1}, ("a", 1), "finished"),
  ],
)
def test_the_status_of_another_attempt_is_left_alone(tmp_path, monkeypatch, before, leader, after):
  monkeypatch.setattr(verdicts.is_over, "set", lambda: None)
  monkeypatch.setattr(verdicts, "trained", {epath.Path(tmp_path)})
  path = tmp_path / "status.json"
  verdict = verdicts.Verdict("lost", 1, "process 1 is gone")
  verdicts.write_status(epath.Path(tmp_path), verdict, leader)
  assert not path.exists()
  path.write_text(json.dumps(before))
  verdicts.write_status(epath.Path(tmp_path), verdict, leader)
  assert json.loads(path.read_text())["state"] == after
  monkeypatch.setattr(verdicts, "trained", set())
  path.write_text(json.dumps(before))
  verdicts.write_status(epath.Path(tmp_path), verdict, leader)
  assert json.loads(path.read_text()) == before


def test_only_a_job_that_trains_is_said_to_go_on():
  verdict = verdicts.Verdict("stalled", 0, "this process is stuck")
  again = "this process is stuck (status 75). If started again, the job"
  assert verdict.line(of=None) == f"{again} may succeed."
  assert verdict.line(of=None, trains=True) == f"{again} resumes from its newest checkpoint."
