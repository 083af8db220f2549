"""Streams of requests, in the order in which a service would see them."""
