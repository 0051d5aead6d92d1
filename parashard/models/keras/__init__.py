"""Beneath `parashard.keras`: what of a model is trained, what is compiled of it, and the layer that looks rows up."""
