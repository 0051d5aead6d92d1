"""What a script gives to train on: arrays, datasets, loaders and tables, as examples by index."""
