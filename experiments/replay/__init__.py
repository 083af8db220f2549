"""One recorded pass of the model, replayed at many thresholds without it."""
