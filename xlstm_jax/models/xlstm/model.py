"""The xLSTM language model."""

from xlstm_jax.models.language_model import LanguageModel
from xlstm_jax.models.xlstm.config import XLSTMConfig


class XLSTM(LanguageModel[XLSTMConfig]):
    """An xLSTM language model; it is called as `LanguageModel` describes.

    Attributes:
        config: The shape of the model.
    """

    config: XLSTMConfig
