"""The capacity of one coordinator: the calls of up to 1,000 workers and of 64 shards at a real coordinator process."""
