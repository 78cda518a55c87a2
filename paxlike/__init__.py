# SPDX-License-Identifier: Apache-2.0
"""Trains language models from one experiment class."""

import importlib.util
import os
import sys

# With gcsfs, paths on gs:// need no TensorFlow: epath would import it wherever it is installed, for
# ten seconds in each process. epath asks once, so that this must come before its first path.
if importlib.util.find_spec("gcsfs") is not None:
  os.environ.setdefault("EPATH_USE_TF", "0")
# gcsfs never lists a folder again by default, and would not see what other processes write.
os.environ.setdefault("FSSPEC_GCS", '{"use_listings_cache": false}')
if "fsspec.config" in sys.modules:  # Then it has read the environment already.
  sys.modules["fsspec.config"].conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)

__version__ = "0.1.0"
