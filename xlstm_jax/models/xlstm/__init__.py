"""xLSTM language models: the 7B-style blocks and those of the original paper. Importing them registers their kinds."""

from xlstm_jax.models.xlstm import mlstm, mlstm_up, slstm
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.model import XLSTM

__all__ = ["XLSTM", "XLSTMConfig", "mlstm", "mlstm_up", "slstm"]
