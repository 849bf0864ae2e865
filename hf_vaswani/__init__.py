"""The Transformer of "Attention Is All You Need" for Hugging Face transformers.

Importing the package registers the model, after which `AutoConfig`, `AutoModel` and `AutoModelForSeq2SeqLM` know it.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_vaswani import TABLE_3, VaswaniConfig
from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel


__version__ = "0.1.0"

AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig)
AutoModel.register(VaswaniConfig, VaswaniModel)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration)

# Every checkpoint carries the code that it needs.
VaswaniConfig.register_for_auto_class()
VaswaniModel.register_for_auto_class("AutoModel")
VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = [
    "TABLE_3",
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
]
