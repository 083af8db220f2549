"""Watching what calibrated reuse costs: some hits are computed after all, and compared with what was served.

serving    hits are drawn with a known probability                      auditor.py, audit.py
later      a drawn hit is computed, when nobody else computes           shadow.py
verdict    a changed answer strikes its source, and enters the account  rate.py, alarm.py
alarm      the first halves what is served, the second ends it          trust.py
renewal    the newest requests that were looked into calibrate anew     fresh.py
"""
