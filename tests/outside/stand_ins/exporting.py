"""In place of transformers' `tests/exporters/test_export.py`: its tests are slow ones, and of graphs, not of caches."""


class ExportTesterMixin:
    """Adds no tests."""
