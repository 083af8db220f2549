"""From a YAML file to a folder of results, and reading it again.

file -> grid      checked; lists spread out to one run each
     -> runner    those that are not there yet, one after another
     -> folder    config and environment first, rows, metrics last
     -> read      runs of a folder, for reports
"""
