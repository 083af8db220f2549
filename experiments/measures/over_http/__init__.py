"""Servers measured over their socket, each a process of its own, and what loads them.

made                     a classifier's folder and a calibrated cache's, for a server to load
traffic, answers         what servers are asked, and what the model alone answers
processes                servers: started on a free port, their CPU time and memory, stopped
client -> loops          requests at times of their own (open loop), or when the last one was answered (closed loop)
       -> capacity       the largest rate that is held within a limit of latency
       -> exposition     what a server tells of itself; `looks`, while it is loaded
replicas -> killing      servers on Ray Serve, asked while one after the other is killed
"""
