"""How pushes and pulls travel between a client and a shard: one seam, `Transport`, and what implements it."""
