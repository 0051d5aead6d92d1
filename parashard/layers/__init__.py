"""Layers with hand-written gradients over NumPy and CuPy; `parashard.Sequential` makes a model from a list of them.

Gradients are tested against finite differences. Shapes omit the first axis, which is the examples.
"""

from parashard.layers.base import Layer as Layer
from parashard.layers.base import Pass as Pass
from parashard.layers.base import Pullback as Pullback
from parashard.layers.dense import GELU as GELU
from parashard.layers.dense import Dense as Dense
from parashard.layers.dense import Dropout as Dropout
from parashard.layers.dense import Flatten as Flatten
from parashard.layers.dense import LayerNorm as LayerNorm
from parashard.layers.dense import ReLU as ReLU
from parashard.layers.dense import Sigmoid as Sigmoid
from parashard.layers.dense import Tanh as Tanh
from parashard.layers.embedding import Embedding as Embedding
from parashard.layers.embedding import TableEmbedding as TableEmbedding
from parashard.layers.images import Conv2D as Conv2D
from parashard.layers.images import MaxPool2D as MaxPool2D
from parashard.layers.losses import mean_squared_error as mean_squared_error
from parashard.layers.losses import sigmoid_cross_entropy as sigmoid_cross_entropy
from parashard.layers.losses import softmax_cross_entropy as softmax_cross_entropy
