"""Checkpoints: what lies in the store, how it is written, checked, found again, resharded and collected."""
