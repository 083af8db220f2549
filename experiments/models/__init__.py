"""Models of the experiments: loading by name, architectures with random weights, heads."""
