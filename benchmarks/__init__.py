"""Benchmarks: programs that measure parashard, alone or beside its peers. Nothing imports them."""
