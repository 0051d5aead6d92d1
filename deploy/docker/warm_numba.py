"""Compiles every kernel and encoding once, into NUMBA_CACHE_DIR: run while the image is built, on the building machine.

The cache is per CPU model. On another one a process compiles what it needs at its start, into the same folder.
"""

from __future__ import annotations

import numpy as np

from parashard.encodings import codec
from parashard.layers.row_sums import sum_by_place
from parashard.models.distinct_keys import distinct_keys
from parashard.plan.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, RMSProp
from parashard.plan.variables import Variable
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer

ENCODINGS = ("float32", "bfloat16", "float16", "int8", "topk:0.1")

fused.warm_up()
fused.warm_up_rows()
distinct_keys(np.zeros(1, np.uint64))
sum_by_place(np.zeros((1, 1), np.float32), np.zeros(1, np.int64), 1, np)
for kind in (SGD, Momentum, Nesterov, Adagrad, RMSProp, Adam, AdamW, FTRL, LAMB):
    Optimizer(kind(learning_rate=0.1)).warm_up()
Optimizer(RMSProp(0.1, momentum=0.9)).warm_up()
Optimizer(RMSProp(0.1, centered=True, weight_decay=0.1, decoupled_weight_decay=True)).warm_up()
codec.warm_up(Variable(encoding, (8,), encoding=encoding) for encoding in ENCODINGS)
