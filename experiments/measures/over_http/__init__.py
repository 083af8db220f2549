"""Servers measured over their socket, each a process of its own, and what loads them.

made                     a classifier's folder and a calibrated cache's, for a server to load
traffic                  what servers are asked, and what the model alone answers
processes, exposition    servers: started on a free port, stopped; what they tell of themselves while they are loaded
client -> loops          requests at times of their own (open loop), or when the last one was answered (closed loop)
replicas -> killing      servers on Ray Serve, asked while one after the other is killed
"""
