"""Models of the experiments, and their tokenizers.

name -> loading         the packaged MiniLM, a folder, a name on the hub, or a tiny one that nobody trained
     -> heads           what makes logits of its states, one column a label
     -> architectures   real shapes with random weights, for benchmarks
"""
