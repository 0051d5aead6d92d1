"""How frames travel between a client and a shard: one seam, `Transport`, and what implements it."""
