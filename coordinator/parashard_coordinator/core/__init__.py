"""What the coordinator decides: members, leases, rounds, recovery, the end. All pure; `now_s` is an argument."""
