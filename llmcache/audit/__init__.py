"""The audit of calibrated reuse: some hits are computed after all, and compared with what was served.

call     -> audit         draws hits with a known probability (account)
later    -> idle_worker   computes them again when nobody else computes (recompute)
verdict  -> account       a changed answer quarantines its source, and counts (rate, alarm)
alarm    -> calibration   the first halves what is served, the second ends it
requests -> marking       compared with those of the calibration; renewal: the newest calibrate anew
"""
