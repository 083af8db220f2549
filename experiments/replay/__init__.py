"""Replays of caches from one recorded pass of the model; nothing is timed here.

task -> recording   states, outputs and answers of one pass
     -> replay      hits and answers at many thresholds, or at one chosen in advance
     -> rehearsal   calibrated reuse, replayed many times
keys -> eviction    hits of each policy, and the most that any can get
"""
