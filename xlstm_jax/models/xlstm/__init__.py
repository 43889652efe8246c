"""xLSTM language models. Importing the package registers its kinds of blocks.

These are the blocks of xLSTM-7B and of the original paper, and attention to mix with them.
"""

from xlstm_jax.models.xlstm import attention, mlstm, mlstm_up, slstm
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.model import XLSTM

__all__ = ["XLSTM", "XLSTMConfig", "attention", "mlstm", "mlstm_up", "slstm"]
