"""A shard's weights and optimizer slots, in host or GPU memory, and their update rules."""
