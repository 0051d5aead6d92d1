"""Programs with their own loops: sessions on a cluster, and scheduled functions."""
