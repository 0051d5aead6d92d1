"""Beneath `parashard.torch`: a module's tensors, losses, optimizers, and the layers that look rows up."""
