"""What is known of transformers: where a model keeps its layers, how its forwards are swapped, what its head reads.

model -> adapters    trunk: its layers, norm and attention, and how outputs are packed
      -> hooks       forwards of trunk and layers are swapped; calls go to a listener
      -> heads       what is read of the last layer, and so what an entry keeps (payloads, in packing)
      -> sentences   the same of sentence-transformers models
      -> weights     digest of what produced a state
      -> coupling    whether rows of a call affect each other
call  -> arguments, masks, rope, model_config: what its arguments mean
"""
