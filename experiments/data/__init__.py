"""Data sets: by name from the Hugging Face hub, or from the files of a data folder. Both give the same records."""
