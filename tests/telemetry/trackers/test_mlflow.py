# SPDX-License-Identifier: Apache-2.0
"""The tracker of MLflow with a client that only records; test_libraries.py has the real one."""

import getpass
from unittest import mock

import pytest
from etils import epath

from paxlike.telemetry.trackers.mlflow import Mlflow
from paxlike.telemetry.trackers.tracker import TrackedRun


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 1000"), OSError(), None])
def test_a_user_without_a_name_is_left_out(error, monkeypatch, tmp_path):
  """As in a container that runs with another user's id."""
  library = pytest.importorskip("mlflow")
  client = mock.MagicMock()
  client.search_runs.return_value = []
  client.create_run.return_value.data = mock.MagicMock(params={}, metrics={"train/updates": 3.0})
  monkeypatch.setattr(library, "MlflowClient", lambda: client)
  monkeypatch.setattr(getpass, "getuser", mock.Mock(side_effect=error, return_value="me"))
  run = TrackedRun(id="a1", name="run", folder=epath.Path(tmp_path))
  assert Mlflow().open(run) == {"train": 3}
  tags = {"paxlike_run": "a1"} | ({} if error else {"mlflow.user": "me"})
  assert client.create_run.call_args.kwargs["tags"] == tags
