"""Data sets: by name from the Hugging Face hub, or from the files of a data folder. Both give the same records.

name or files -> source   where records come from
              -> labelled, squad, openbookqa, wikitext, traces   records of one set; made: stand-ins
              -> streams  the order in which a service would see them
"""
