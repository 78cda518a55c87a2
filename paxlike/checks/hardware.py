# SPDX-License-Identifier: Apache-2.0
"""A description of the devices and the mesh."""

from collections import Counter
from collections.abc import Iterator

import jax
import jaxlib.version

from paxlike.checks.check import PASS, Check
from paxlike.telemetry import formatting
from paxlike.training.trainer import Trainer

ITEM = "devices"


def found(trainer: Trainer) -> Iterator[Check]:
  """Yields checks that describe devices, versions and mesh; they always pass."""
  devices = trainer.devices
  kinds = Counter(device.device_kind for device in devices.devices.flat)
  count = jax.process_count()
  processes = f"{count} process{'es' if count > 1 else ''}"
  every = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
  yield _fact("devices", f"{every}, {processes}")
  device = devices.local_devices[0]
  facts = [f"platform {device.platform}"]
  if capability := getattr(device, "compute_capability", None):
    facts.append(f"compute capability {capability}")
  if (index := getattr(device, "slice_index", None)) is not None:
    facts.append(f"slice {index}")
  memory = (device.memory_stats() or {}).get("bytes_limit")
  facts.append(f"memory {formatting.nbytes(memory)}" if memory else "memory not reported")
  yield _fact("first of this process", ", ".join(facts))
  version = " ".join(device.client.platform_version.split())
  yield _fact(
    "versions", f"JAX {jax.__version__}, jaxlib {jaxlib.version.__version__}, plugin {version}"
  )
  ici, dcn = trainer.mesh.sizes(devices.size)
  axes = [f"{axis} {ici[axis] * dcn[axis]}" for axis in ici if ici[axis] * dcn[axis] > 1]
  inner = [f"{axis} {size}" for axis, size in ici.items() if size > 1]
  outer = [f"{axis} {size}" for axis, size in dcn.items() if size > 1]
  text = " x ".join(axes) or "one device"
  if outer:
    text += f" (ICI {' x '.join(inner) or '1'}; DCN {' x '.join(outer)})"
  yield _fact("mesh", text)


def _fact(name: str, detail: str) -> Check:
  return Check(item=ITEM, name=name, verdict=PASS, detail=detail)
