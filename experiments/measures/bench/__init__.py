"""Benchmarks of the library itself: latency of each kind of call, memory and rate of storing."""
