"""The audit of calibrated reuse: some hits are recomputed, and the answers compared.

call     -> audit         draws hits with a known probability (account)
later    -> idle_worker   recomputes them in idle moments (recompute, recomputer)
verdict  -> account       a changed answer quarantines its source, and counts (rate, alarm)
alarm    -> calibration   the first halves what is served, the second ends it
requests -> marking       compared with those of the calibration (drift)
         -> renewal       the newest ones calibrate anew
"""
