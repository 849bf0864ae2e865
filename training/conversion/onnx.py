"""Conversion of a model to ONNX graphs, which other runtimes read, such as onnxruntime."""

import contextlib
import copy
import io
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_vaswani import VaswaniForConditionalGeneration
from hf_vaswani.kernels_vaswani import Int8Linear

from ..files import folder_written_whole
from .agreement import NEW_TOKENS, Agreement, example_batch
from .fields import check_unrestricted


try:
    import onnxscript  # noqa: F401 (of the exporter, which would name no extra)
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    from .onnx_greedy import OnnxTranslator
except ModuleNotFoundError as error:
    raise ImportError(f"ONNX needs more packages: pip install 'hf-vaswani[onnx]' ({error}).") from error
try:
    from transformers.exporters import ExportedModel, ExportFormat, OnnxConfig, OnnxExporter
except ImportError as error:
    raise ImportError(f"ONNX needs transformers 5.23 or newer, found {transformers.__version__}.") from error


CAPTURED = 3  # target tokens that the exporter generates to see the shapes


def write(model: VaswaniForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> Agreement:
    """Write a model as three ONNX graphs atomically, with its tokenizer, and compare what was written.

    The graphs are `encoder.onnx`, `prefill.onnx` for the first target token, and `decode.onnx` for one more;
    `onnx_greedy.py` uses them. Their weights lie beside them, in files that end in `.data`.

    Args:
        model (`VaswaniForConditionalGeneration`): Model to convert. It does not change.
        tokenizer (`PreTrainedTokenizerBase`): Tokenizer of the same checkpoint.
        folder (`str` or `Path`): Folder to write: a new or an empty one.

    Raises:
        ImportError: A package is missing, or transformers is older than 5.23; raised on the import of this module.
        OSError: `folder` is not empty, or cannot be written.
        ValueError: The model cannot be exported. The message names the field.
    """
    _check(model)
    greedy = _greedy_copy(model)
    batch = example_batch(model, tokenizer)
    with folder_written_whole(Path(folder)) as partial:
        exported = _export(greedy, batch)
        exported.generation_config = model.generation_config
        exported.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        agreement = _compare(greedy, batch, partial)
        agreement.check(folder)
    return agreement


def _check(model: VaswaniForConditionalGeneration) -> None:
    """Raise ValueError for a model that cannot be exported."""
    if not isinstance(model, VaswaniForConditionalGeneration):
        raise ValueError(f"ONNX: expected a Vaswani model, found {type(model).__name__}.")
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("ONNX: expected a model before to_int8(); its 8-bit products have no ONNX form.")
    check_unrestricted("ONNX", model.config)
    settings, most = model.generation_config, model.config.max_position_embeddings
    if settings.decoder_start_token_id is None and settings.bos_token_id is None:
        raise ValueError("ONNX: decoder_start_token_id: expected an id, found none, nor a bos_token_id.")
    if most <= CAPTURED:
        raise ValueError(f"ONNX: max_position_embeddings: expected at least {CAPTURED + 1}, found {most}.")


def _greedy_copy(model: VaswaniForConditionalGeneration) -> VaswaniForConditionalGeneration:
    """The same model in float32 on the CPU, whose `generate()` is greedy and has no other settings."""
    if (model.device.type, model.dtype) != ("cpu", torch.float32):
        model = copy.deepcopy(model).to("cpu", torch.float32)
    model, settings = copy.copy(model), model.generation_config
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(settings, name) for name in names})
    return model


def _export(model: VaswaniForConditionalGeneration, batch: dict[str, torch.Tensor]) -> ExportedModel:
    """Graphs of any batch size, source length and target length.

    Args:
        model (`VaswaniForConditionalGeneration`): A greedy model.
        batch (`dict`): Sentences, more than one and padded: the exporter takes sizes of 0 and 1 for constants.
    """
    exporter, options = OnnxExporter(), OnnxConfig(dynamic=True)
    with contextlib.redirect_stdout(io.StringIO()):  # where it reports its steps
        encoder = exporter.export(model.model.encoder, batch, options)
        # Of a decoder step with one token before it, the exporter would make one for that length only.
        decoder = exporter.export_for_generation(model, batch, options, multi_token_decode=True)
    components = {"encoder": encoder.components["model"], **decoder.components}
    for component in components.values():
        ClearMetadataAndDocStringPass()(component.program)  # the paths of this machine's source files
    return ExportedModel(components, ExportFormat.ONNX, model.config)


@torch.no_grad()
def _compare(model: VaswaniForConditionalGeneration, batch: dict[str, torch.Tensor], folder: Path) -> Agreement:
    """Compare the greedy translations of a few sentences, and the logits along those of the model."""
    most = min(NEW_TOKENS, model.config.max_position_embeddings - 1)
    ids = model.generate(**batch, max_new_tokens=most)
    logits = model(**batch, decoder_input_ids=ids[:, :-1]).logits
    source, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
    translator = OnnxTranslator(folder)
    step, inputs = translator.first(source, mask)
    steps = [step]
    for tokens in ids[:, 1:-1].T.numpy():
        step, inputs = translator.next(tokens, inputs)
        steps.append(step)
    difference = (torch.from_numpy(np.stack(steps, axis=1)) - logits).abs().max()
    # Relative to the best tokens: a token that is shut out may have the largest logit, a negative one.
    relative = difference / logits.amax(-1).abs().max()
    found = translator(source, mask, most)
    equal = sum(row.tolist() == own.tolist() for row, own in zip(found, ids[:, 1:].numpy()))
    return Agreement(len(ids), float(relative), equal)
