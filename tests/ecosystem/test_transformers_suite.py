"""transformers' own common tests, by which it judges the models it takes in, run on this one.

They are not part of the installed library: `TRANSFORMERS_SOURCE` names a source tree of the installed release
(`git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers`).
"""

import importlib
import os
import sys
import unittest
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

from hf_vaswani import VaswaniConfig, VaswaniForConditionalGeneration, VaswaniModel


SOURCE = os.environ.get("TRANSFORMERS_SOURCE")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOURCE, reason="TRANSFORMERS_SOURCE names no source tree of transformers"),
]


class VaswaniModelTester:
    """Tester that the common tests expect of a model."""

    base_model_class = VaswaniModel
    batch_size, seq_length, vocab_size = 13, 7, 99
    hidden_size, num_hidden_layers, num_attention_heads = 16, 2, 4
    is_training = True

    def get_config(self) -> VaswaniConfig:
        return VaswaniConfig(
            vocab_size=self.vocab_size,
            d_model=self.hidden_size,
            d_ff=32,
            num_heads=self.num_attention_heads,
            encoder_layers=self.num_hidden_layers,
            decoder_layers=self.num_hidden_layers,
            attention_dropout=0.1,
            pad_token_id=1,
            bos_token_id=0,
            decoder_start_token_id=3,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[VaswaniConfig, dict]:
        source, target = torch.randint(4, self.vocab_size, (2, self.batch_size, self.seq_length))
        source[:, -1] = 2  # ends with the end token
        mask = torch.ones_like(source)
        inputs = {"input_ids": source, "decoder_input_ids": target}
        return self.get_config(), {**inputs, "attention_mask": mask, "decoder_attention_mask": mask}


def common_tests() -> type[unittest.TestCase]:
    """The library's mixins, for this model.

    Raises:
        ValueError: The source tree is not one of the installed release.
    """
    source = Path(SOURCE)
    declared = f'__version__ = "{transformers.__version__}"'
    if declared not in (source / "src" / "transformers" / "__init__.py").read_text(encoding="utf-8"):
        raise ValueError(f"{source} is not the source of transformers {transformers.__version__}, which is installed.")
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tests"}
    sys.path.insert(0, str(source))
    try:
        names = ("generation.test_utils", "test_configuration_common", "test_modeling_common")
        generation, configuration, modeling = (importlib.import_module(f"tests.{name}") for name in names)
    finally:
        sys.path.remove(str(source))
        theirs = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tests"}
        sys.modules.update(theirs | ours)

    class VaswaniModelTest(modeling.ModelTesterMixin, generation.GenerationTesterMixin, unittest.TestCase):
        all_model_classes = (VaswaniModel, VaswaniForConditionalGeneration)
        all_generative_model_classes = (VaswaniForConditionalGeneration,)
        is_encoder_decoder = True
        test_missing_keys = False  # as of Marian: every weight but the shared one is tied or needed

        def setUp(self):
            self.model_tester = VaswaniModelTester()
            self.config_tester = configuration.ConfigTester(self, config_class=VaswaniConfig)

        def test_config(self):
            self.config_tester.run_common_tests()

    return VaswaniModelTest


if SOURCE:
    # The tests look up which inputs a class takes in these tables of names.
    modeling_auto.MODEL_MAPPING_NAMES["vaswani"] = "VaswaniModel"
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES["vaswani"] = "VaswaniForConditionalGeneration"
    TestVaswani = common_tests()
