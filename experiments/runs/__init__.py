"""From a YAML file to a results folder, and back.

file -> grid      checked; lists expanded to one run per combination
     -> runner    the missing runs, one after another
     -> folder    config and environment first, rows, metrics last
     -> read      runs of a folder, for reports
"""
