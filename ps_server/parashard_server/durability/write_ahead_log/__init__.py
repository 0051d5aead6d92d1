"""The write-ahead log: applied pushes are durable before they are acknowledged, so a killed shard loses none.

`records` has the format, `segments` the files, `log` appends and syncs, `replay` reads back. Used with
`durability = "log"`. Implements rule P18 of docs/protocol.md.
"""
