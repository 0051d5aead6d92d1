"""Compiles every kernel and encoding once, into NUMBA_CACHE_DIR: run while the image is built, on the building machine.

The cache is per CPU model. On another one a process compiles what it needs at its start, into the same folder.
"""

from __future__ import annotations

import numpy as np

from parashard.data.hashing import keys_of_texts
from parashard.encodings import codec
from parashard.layers.row_sums import sum_by_place
from parashard.models.looking_up import distinct_keys
from parashard.plan.variables import Variable
from parashard_server.state.kernels import fused
from parashard_server.state.kernels.compiling import LOOPS

ENCODINGS = ("float32", "bfloat16", "float16", "int8", "topk:0.1")

fused.warm_up()
for declared in LOOPS.values():
    declared.code  # noqa: B018  # compiles it
keys_of_texts(["text"])
distinct_keys(np.zeros(1, np.uint64))
sum_by_place(np.zeros((1, 1), np.float32), np.zeros(1, np.int64), 1, np)
codec.warm_up(Variable(encoding, (8,), encoding=encoding) for encoding in ENCODINGS)
