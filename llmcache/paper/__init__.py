"""The paper's layer-wise cache (LLMCache, Bansal 2025): `LLMCache.wrap(model, tau=0.85)`.

f_X <- fingerprint of the embedding output                      `fingerprints`
for each layer l:                                               `layerwise`, one `LayerForward` per layer
    search bank l for a stored f' with sim(f_X, f') >= tau      `bank`, one per layer, with its FAISS index
    hit:   h_l <- h'_l, the layer is skipped
    miss:  h_l <- layer_l(h_{l-1}); store (f_X, h_l) in bank l, packed by `codecs`, evicted by `policies`
"""
