"""Servers as processes, measured over their socket, and their load generators.

made              folders of a classifier and a calibrated cache, for a server to load
traffic           requests to servers, and the model's own answers to them
servers           servers: started on a free port, watched, stopped
client -> loops   requests at fixed times (open loop), or after the previous reply (closed loop)
replicas          servers on Ray Serve
"""
