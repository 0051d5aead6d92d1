"""The protocol between processes: messages as values, their encoding, and the calls that carry them."""
