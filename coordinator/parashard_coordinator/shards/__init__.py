"""The coordinator as a caller of shards: what it tells them, and how it watches them."""
