"""Internals of `parashard.keras`: a model's variables, its compiled functions, and the embedding layer."""
