# SPDX-License-Identifier: Apache-2.0
"""Configuration: knobs, their types, and Fiddle graphs as text, as edits and as files."""
