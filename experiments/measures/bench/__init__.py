"""Benchmarks of the library itself: random weights where texts do not matter, no quality.

model -> latency, service_rounds   what each kind of call costs, interleaved and in whole blocks
      -> memory                    bytes an entry, entries stored a second
      -> generation                the first token and those after it
      -> pattern                   what a hit rate is worth on another model
at_url                             a server that runs already, under load
"""
