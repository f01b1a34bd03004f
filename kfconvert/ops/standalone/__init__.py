"""The operators for use by hand."""

from .attention import *
from .batch_norm_act import *
from .block_sparse import *
from .blocks import *
from .contraction import *
from .cross_entropy import *
from .dropout_act import *
from .elementwise import *
from .embedding_layer_norm import *
from .norm_names import *
from .normalize_image import *
from .optimizers import *
from .prelu_bias import *
from .quantize import *
from .reduce import *
from .series import *
from .softmax import *
