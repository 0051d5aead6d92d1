"""Wire encodings of gradients: fewer bytes for a push, with error feedback where an encoding leaves something behind.

`encoding` is the value that a job file names, `codec` puts a slice into bytes and back, `feedback` keeps what an
encoding left behind; `reference` is the arithmetic to be read and `compiled` the same by Numba. Called by
`parashard.client.shard_client` (encodes) and `parashard_server.state.storage` (decodes).
"""

from parashard.encodings.codec import decode, warm_up
from parashard.encodings.encoding import Encoding
from parashard.encodings.feedback import Encoded, GradientEncoder

__all__ = ["Encoded", "Encoding", "GradientEncoder", "decode", "warm_up"]
