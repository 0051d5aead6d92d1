"""Training data of a script: arrays, datasets, loaders and tables, as examples by index."""
