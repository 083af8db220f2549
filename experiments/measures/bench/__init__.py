"""Benchmarks of the library itself: random weights, as texts do not matter; quality is not measured.

model -> latency   time of each kind of call, interleaved and in whole blocks
      -> memory    bytes per entry, entries stored per second
at_hand            whether a device is available
"""
