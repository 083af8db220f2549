"""From results folders to tables, pictures and verdicts; everything is made from files.

runs -> tables (columns)          Markdown, by measure
     -> pictures                  by measure
     -> claims                    verdicts on the paper's claims
        -> pages                  README.md and docs/results/, from the results of this repository
        -> write                  REPORT.md, from any results folder
"""
