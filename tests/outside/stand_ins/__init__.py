"""Modules that transformers' common mixins import and its source archive lacks."""
