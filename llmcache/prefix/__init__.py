"""Reuse of what requests begin with: blocks of K/V and states, cut off a call and put back."""
