"""Servers as processes, measured over their socket, and their load generators.

made                     folders of a classifier and a calibrated cache, for a server to load
traffic                  requests to servers, and the model's own answers to them
processes, exposition    servers: started on a free port, stopped; their metrics under load
client -> loops          requests at fixed times (open loop), or after the previous reply (closed loop)
replicas -> killing      servers on Ray Serve, under load while they are killed one after the other
"""
