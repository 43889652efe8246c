"""The sLSTM: a scalar memory with exponential gating and a recurrence through the hidden state."""

from xlstm_jax.kernels.slstm.api import slstm, slstm_step
from xlstm_jax.kernels.slstm.state import SLSTMState, empty_state

__all__ = ["SLSTMState", "empty_state", "slstm", "slstm_step"]
