# SPDX-License-Identifier: Apache-2.0
"""Accelerators and the mesh: data sheets, topologies, compiler options, batch placement."""
