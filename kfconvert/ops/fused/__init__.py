"""The operators of the fused modules, and their helpers."""

from .act_mul import *
from .bias_act import *
from .conv_act import *
from .group_norm_act import *
from .layer_norm_act import *
from .linear_act import *
from .rms_norm_act import *
from .rotary import *
from .scale_shift_act import *
