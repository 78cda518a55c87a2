# SPDX-License-Identifier: Apache-2.0
"""The hardware that a step is predicted for."""

import dataclasses

from paxlike.devices import chips, interconnect, kernel_rates
from paxlike.devices.chips import Chip
from paxlike.devices.interconnect import Network
from paxlike.devices.kernel_rates import FITTED, Fitted, KernelRates
from paxlike.planning.software import PAXLIKE, Software


@dataclasses.dataclass(frozen=True, eq=False)  # Hashed often: by identity.
class Machine:
  """The hardware of a run, at the rates that a program reaches on it.

  Attributes:
    chip: The chip of each device.
    network: The interconnect, at the rates that collectives reach.
    rates: The rates of kernels.
    fitted: The fitted constants.
    software: The program.
  """

  chip: Chip
  network: Network
  rates: KernelRates
  fitted: Fitted = FITTED
  software: Software = PAXLIKE


def find(
  device_kind: str,
  *,
  software: Software = PAXLIKE,
  fitted: Fitted = FITTED,
  dcn_bandwidth: float | None = None,
) -> Machine | None:
  """Returns the machine of a JAX `device_kind`; None if its data sheet is unknown.

  `dcn_bandwidth` is that of the slow network in bytes/s; None: that of the data sheet.
  """
  chip, network = chips.find(device_kind), interconnect.find(device_kind)
  if chip is None or network is None or not chip.memory or not chip.bandwidth:
    return None
  if software.bandwidth is not None:
    chip = dataclasses.replace(chip, bandwidth=software.bandwidth)
  rates = kernel_rates.of_chip(
    chip,
    software.attention,
    libraries_of_2023=software.libraries_of_2023,
    power=software.power,
    fitted=fitted,
  )
  fast, slow = fitted.fast_tpu, fitted.slow_tpu
  if chip.is_gpu:
    fast, slow = fitted.fast, fitted.slow
  slow *= dcn_bandwidth or network.slow
  network = dataclasses.replace(network, fast=fast * network.fast, slow=slow)
  return Machine(chip, network, rates, fitted, software)
