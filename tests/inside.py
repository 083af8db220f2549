"""Gives tests a cache's private parts: a rename inside the library changes only this file."""

from llmcache import LLMCache
from llmcache.engines.engine import Eager
from llmcache.engines.onnx import OnnxGraph, Precision
from llmcache.memory.bank import Bank
from llmcache.reuse.audit.audit import Audit
from llmcache.reuse.draft import Draft
from llmcache.reuse.sources import Sources


def bank(cache: LLMCache) -> Bank:
    return cache._core.bank


def sources(cache: LLMCache) -> Sources:
    return cache._core.learn().reuse.semantic.sources


def audit(cache: LLMCache) -> Audit:
    return cache._core.learn().reuse.audit


def draft(cache: LLMCache) -> Draft:
    made = cache._core.learn().reuse.draft
    assert made is not None
    return made


def graph(cache: LLMCache, precision: Precision) -> OnnxGraph:
    """Make a graph of the trunk."""
    return cache._core._make_onnx(precision)


def eager(cache: LLMCache) -> Eager:
    return cache._core.forward.eager


def keep_quiet(cache: LLMCache) -> LLMCache:
    """Keep the audit's worker idle until `drain`."""
    worker = audit(cache).worker
    worker._idle_s = worker._patience_s = 1e6
    return cache
