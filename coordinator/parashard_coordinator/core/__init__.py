"""The coordinator's decisions: members, leases, rounds, recovery, the end. All pure; `now_s` is an argument."""
