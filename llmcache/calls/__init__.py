"""The calls of one wrapped model: their order (`call`), the parts they use (`core`), and saves.

wrapped      what belongs to one wrapped model
core         builds the parts of a cache
call         open, look up, answer, close; the rung `exact` and the path of rows
prefix       calls that keep K/V: known blocks are cut off, the rest is computed
prepared     calls that are looked up before they are made; found: a batch of these
calibrator   prepares a model for approximate reuse
save         all that is kept, in a folder
"""
