"""Programs beside a run: sessions of a cluster, and functions that are scheduled."""
