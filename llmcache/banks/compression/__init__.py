"""How stored states are packed; the codecs are those of `llmcache.paper`."""

from llmcache.paper.codecs import CODECS, PCA, Autoencoder, Codec, Half, Int8, Plain

__all__ = ["CODECS", "PCA", "Autoencoder", "Codec", "Half", "Int8", "Plain"]
