"""A quarter of an hour with a GPU: `python -m benchmarks.gpu` measures in the order of what matters, within a limit."""
