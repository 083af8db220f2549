"""The audit of calibrated reuse: recomputes a sample of the hits and compares the answers.

call     -> audit            draws hits with a known probability (account)
later    -> idle_worker      recomputes them in idle moments (recompute, recomputer)
verdict  -> account          a changed answer quarantines its source, and counts (rate, alarm)
alarm    -> calibration      the first halves approximate reuse, the second ends it
requests -> known_features   compared with those of the calibration (drift)
         -> renewal          the newest requests make the next calibration
"""
