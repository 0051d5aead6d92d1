"""A shard's weights and optimizer slots, in the memory of the host or of a GPU, and the arithmetic on them."""
