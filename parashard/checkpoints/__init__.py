"""Checkpoints: their format in the store, writing, verification, restore, resharding and retention."""
