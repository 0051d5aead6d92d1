"""Compiles every kernel and encoding once, into NUMBA_CACHE_DIR: run while the image is built, on the building machine.

The cache is per CPU model. On another one a process compiles what it needs at its start, into the same folder.
"""

from __future__ import annotations

from parashard.encodings import codec
from parashard.plan.optimizers import FTRL, LAMB, SGD, Adagrad, Adam, AdamW, Momentum, Nesterov, RMSProp
from parashard.plan.variables import Variable
from parashard_server.state.kernels import fused
from parashard_server.state.optimizer import Optimizer

ENCODINGS = ("float32", "bfloat16", "float16", "int8", "topk:0.1")

fused.warm_up()
for kind in (SGD, Momentum, Nesterov, Adagrad, RMSProp, Adam, AdamW, FTRL, LAMB):
    Optimizer(kind(learning_rate=0.1)).warm_up()
codec.warm_up(Variable(encoding, (8,), encoding=encoding) for encoding in ENCODINGS)
