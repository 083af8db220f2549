"""How a stored state is packed. A codec turns one named tensor into named tensors, and back.

state -> packers   the packers of the weights in force, one a layer
      -> packer    a codec at work: fitted on the first states, and what it loses measured
      -> codec     encode: what is stored; decode: what is served
"""

from llmcache.banks.compression.autoencoder import Autoencoder
from llmcache.banks.compression.base import Codec
from llmcache.banks.compression.pca import PCA
from llmcache.banks.compression.rounding import Half, Int8, Plain
from llmcache.registry import Registry

__all__ = ["CODECS", "PCA", "Autoencoder", "Codec", "Half", "Int8", "Plain"]

CODECS: Registry[Codec] = Registry(
    "compression", Codec, {"none": Plain, "fp16": Half, "int8": Int8, "pca": PCA, "autoencoder": Autoencoder}
)
