"""Models of the experiments, and their tokenizers.

name -> loading         the packaged MiniLM, a folder, a name on the hub, or a tiny untrained model
     -> heads           logits from its states, one column per label
     -> architectures   real shapes with random weights, for benchmarks
"""
