"""The mLSTM: a matrix memory with exponential gating."""

from xlstm_jax.kernels.mlstm.api import mlstm, mlstm_step
from xlstm_jax.kernels.mlstm.state import MLSTMState, empty_state

__all__ = ["MLSTMState", "empty_state", "mlstm", "mlstm_step"]
