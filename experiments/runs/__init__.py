"""From a YAML file to a results folder, and back.

file -> grid      checked; lists expanded to one run per combination
     -> runner    the missing runs, one after another; their folders: config and environment first, metrics last
     -> read      runs of a folder, for reports
"""
