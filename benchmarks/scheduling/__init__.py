"""How much one coordinator bears: the calls of up to 1,000 workers and of 64 shards at a real coordinator process."""
