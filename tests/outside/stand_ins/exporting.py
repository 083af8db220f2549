"""Replaces transformers' `tests/exporters/test_export.py`, whose tests are slow, and test graphs, not caches."""


class ExportTesterMixin:
    """Adds no tests."""
