"""What is known of transformers: where a model keeps its layers, how its forwards are swapped, what its head reads.

model -> adapters    trunk: its layers, norm and attention, and how outputs are packed
      -> hooks       forwards of trunk and layers are swapped; calls go to a listener
      -> heads       what is read of the last layer, and so what an entry keeps (payloads)
      -> weights     digest of what produced a state
call  -> arguments, masks, rope, tracing: what its arguments mean
"""
