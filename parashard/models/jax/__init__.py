"""Internals of `parashard.jax`: arrays of JAX, and a step on a GPU."""
