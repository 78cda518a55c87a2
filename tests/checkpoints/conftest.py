# SPDX-License-Identifier: Apache-2.0
import pytest

from paxlike.checkpoints.run_checkpoints import Checkpoints


@pytest.fixture
def saved(tmp_path):
  with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
    yield checkpoints
