"""Data sets: by name from the Hugging Face hub, or from files of a data folder. Both give the same records.

name or files -> source   the origin of records
              -> labelled, published, traces   records of one set; made: stand-ins
              -> streams  the order in which a service would see them
"""
