"""Calibrated reuse: which stored request may serve which other one, with a bound on how many answers change.

requests -> observer            what the model answered to each
         -> training            fingerprint and risk model, fitted on part A and B
         -> calibration         the largest risk that the target allows, measured on part C (bounds)
         -> calibrated_reuse    who may serve whom from now on
drift: whether later requests are still found like those of part C
published: what other caches need to decide alike; sharing: how they get it on a store
"""
