"""The push log: every applied push on disk before it is acknowledged, so that a killed shard recomputes nothing (P18).

`records` is bytes in and out, `segments` the files, `log` appends and makes durable, `replaying` reads back. Used where
a job says `durability = "log"`.
"""
