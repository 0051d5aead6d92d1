"""The coordinator process: membership, step leases, and the progress of one job."""
