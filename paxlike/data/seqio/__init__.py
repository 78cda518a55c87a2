# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks and TFDS data sets; TensorFlow is imported only where a source is built."""
