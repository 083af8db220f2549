"""Knowledge of transformers: where a model keeps its layers, how its forwards are swapped, what its head reads.

model -> adapters    trunk: its layers, norm and attention, and how outputs are packed
      -> hooks       swaps the forwards of trunk and layers; a listener receives the calls
      -> heads       rows of the last layer that the head reads, which an entry keeps (payloads, in packing)
      -> sentences   the same for sentence-transformers models
      -> weights     digest of the weights that produced a state
      -> coupling    whether rows of a call affect each other (by a trial, as in trials)
      -> causal      whether a beginning can be cut off, and texts packed into one row (by a trial)
call  -> arguments, masks, segments, rope, model_config: meaning of its arguments
"""
