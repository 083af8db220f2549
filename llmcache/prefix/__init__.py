"""Prefix reuse: blocks of K/V and states, cut off a call and joined to its output."""
