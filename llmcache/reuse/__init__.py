"""The data of a call, and what serves its rows approximately, within a calibrated limit.

call          the data of one call, which rungs fill; what a rung and a path are
fingerprint   one vector per request -> sources: its neighbours -> answers, content_gate: which of them may serve
decide        chooses one of them, with its risk; the rung `semantic`, within the limit of `calibration`
draft         the rung `draft`: an answer of another model, or of an int8 copy, made by `drafters`
audit         recomputes a sample of approximate hits in service
approximate   all this of one model as one object
search_cost   whether a search pays
"""
