"""Many workers in a discrete-event simulation, from times that were measured on this machine.

clock       what is measured: caches and a Redis of one's own   -> Times
kinds       what is timed: requests of a classifier, prompts of a decoder
times       samples of times by size, and what a Redis spends
banks       what workers and the store hold, and what knowledge is asked
chains      who can serve whom: prefix blocks of prompts
streams     the traces as such chains, and when requests came
texts       who can serve whom: the decisions of a calibrated cache, recorded
redis       the shared server as two queues, its processor and its link
cluster     workers, routes, writers and the server, on simpy   -> Point
scaling     from points to where a design stops to scale
"""
