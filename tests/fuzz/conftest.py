# SPDX-License-Identifier: Apache-2.0
"""Prints what each campaign counted.

Everything that is marked `fuzz`, wherever it stands, is run by `make fuzz`, with EXAMPLES new
inputs each; as part of `make test` each campaign has a few inputs, always the same.
"""

import campaign
import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
  for name, counts in campaign.COUNTS.items():
    shown = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    terminalreporter.write_line(f"{name}: {sum(counts.values())} inputs: {shown}")
