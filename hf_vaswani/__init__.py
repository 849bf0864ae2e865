"""The Transformer of "Attention Is All You Need" for Hugging Face transformers.

Import the package to register the model with `AutoConfig`, `AutoModel`, `AutoModelForSeq2SeqLM` and
`pipeline("translation")`.
"""

from .versions_vaswani import OLDEST  # isort: skip  # noqa: F401 (first, for its check)

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, pipelines

from . import compiled
from .checksums_vaswani import check_weights
from .configuration_vaswani import TABLE_3, VaswaniConfig
from .modeling_vaswani import VaswaniForConditionalGeneration, VaswaniModel, VaswaniPreTrainedModel
from .pipeline_vaswani import VaswaniTranslationPipeline


__version__ = "0.1.0"

AutoConfig.register(VaswaniConfig.model_type, VaswaniConfig)
AutoModel.register(VaswaniConfig, VaswaniModel)
AutoModelForSeq2SeqLM.register(VaswaniConfig, VaswaniForConditionalGeneration)

# Since 5.19, transformers refuses the names of removed tasks before it looks in its registry.
getattr(pipelines, "REMOVED_TASKS", {}).pop("translation", None)
pipelines.PIPELINE_REGISTRY.register_pipeline(
    "translation", VaswaniTranslationPipeline, AutoModelForSeq2SeqLM, type="text"
)
VaswaniConfig.pipelines_are_registered = True

compiled.load()

# Save the model's code with every checkpoint.
VaswaniConfig.register_for_auto_class()
VaswaniModel.register_for_auto_class("AutoModel")
VaswaniForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")

__all__ = [
    "TABLE_3",
    "VaswaniConfig",
    "VaswaniForConditionalGeneration",
    "VaswaniModel",
    "VaswaniPreTrainedModel",
    "VaswaniTranslationPipeline",
    "check_weights",
]
