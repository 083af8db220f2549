"""Calibrated reuse: which stored request may serve another one, with a bound on how many answers change.

requests -> observer            the model's answer to each
         -> training            fingerprint and risk model, fitted on parts A and B
         -> calibration         the largest risk that the target allows, measured on part C (bounds)
         -> calibrated_reuse    the calibration in force
drift: whether later requests are like those of part C
sharing: one calibration for all caches on a store
"""
