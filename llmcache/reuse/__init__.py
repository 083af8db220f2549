"""How rows of a call are served from what is known: exactly, or approximately within a calibrated limit.

call          the data of one call, which rungs fill; what a rung is
exact         the rung `exact`: the entry under a row's own key
fingerprint   one vector per request -> sources: its neighbours -> answers, content_gate, decide: one, with its risk
semantic      the rung `semantic`: within the limit of `calibration`
draft         the rung `draft`: an answer of another model, or of an int8 copy, made by `drafters`
audit         recomputes a sample of approximate hits in service
"""
