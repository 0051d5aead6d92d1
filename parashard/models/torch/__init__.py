"""Internals of `parashard.torch`: a module's tensors, losses, optimizers, and the embedding layers."""
