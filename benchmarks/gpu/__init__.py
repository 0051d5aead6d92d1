"""A quarter of an hour with a GPU: `python -m benchmarks.gpu` measures the most important first, within a limit."""
