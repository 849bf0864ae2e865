"""Seeded ways to spoil the files of a checkpoint."""

import json
import struct
from pathlib import Path
from random import Random


JSON_FILES = (
    *("config.json", "config.json", "generation_config.json", "generation_config.json"),
    *("tokenizer_config.json", "tokenizer.json", "checksums.json"),
)
WEIGHTS = "model.safetensors"
# What people and damaged disks write in the place of a value.
VALUES = (
    *(None, True, False, 0, 1, -1, 2, 3, 0.5, -0.5, 10**3, 10**6, 10**12, 10**30, 2**31, 2**63, 1e300, -1e300),
    *(float("nan"), float("inf"), "", "four", "4", "null", "../x", "a" * 5000, "ü", [], [[]], [1, 2], ["x"], [None]),
    *({}, {"a": 1}, {"": {}}, [{}], {"0": [0]}),
)
OTHER = (b"", b"null", b"[]", b"3", b'"x"', b"{}", b"{}}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 99)
# Fields that transformers reads, but this project does not write.
MORE_FIELDS = {
    "config.json": (
        *("quantization_config", "attn_implementation", "dtype", "torch_dtype", "auto_map", "custom_pipelines"),
        *("output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder", "tie_encoder_decoder"),
        *("num_labels", "id2label", "label2id", "problem_type", "tokenizer_class", "hidden_size", "text_config"),
        *("rope_parameters", "layer_types", "per_layer_config", "num_hidden_layers", "chunk_size_feed_forward"),
        *("experts_implementation", "_name_or_path", "name_or_path", "base_model_tp_plan", "_commit_hash"),
        *("max_length", "num_beams", "pruned_heads", "architectures", "model_type"),
    ),
    "generation_config.json": (
        *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "early_stopping", "max_time"),
        *("stop_strings", "do_sample", "num_beams", "use_cache", "cache_implementation", "cache_config"),
        *(
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "top_h",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "repetition_penalty",
        ),
        *(
            "repetition_penalty",
            "encoder_repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "bad_words_ids",
        ),
        *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "token_healing", "guidance_scale", "watermarking_config"),
        *("num_return_sequences", "output_attentions", "output_scores", "return_dict_in_generate"),
        *("encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens", "assistant_early_exit", "compile_config"),
        *("penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups", "constraints", "force_words_ids"),
        *("prefill_chunk_size", "use_mtp", "length_penalty_form", "max_extra_tokens", "fast_decoding", "ensemble"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "renormalize_logits", "generate"),
    ),
    "tokenizer_config.json": (
        *("tokenizer_class", "auto_map", "model_max_length", "padding_side", "truncation_side", "pad_token"),
        *("bos_token", "eos_token", "unk_token", "added_tokens_decoder", "extra_special_tokens", "chat_template"),
        *("model_input_names", "additional_special_tokens", "clean_up_tokenization_spaces", "split_special_tokens"),
        *("tokenizer_file", "name_or_path", "special_tokens_map_file", "add_prefix_space", "backend"),
    ),
    "tokenizer.json": ("version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "model"),
    "checksums.json": ("config.json", "generation_config.json", "model.safetensors", "../config.json"),
}


def spoil(folder: Path, seed: int) -> str:
    """Spoils one file of a checkpoint; says how."""
    random = Random(seed)
    name = random.choice((*JSON_FILES, WEIGHTS))
    path = folder / name
    if name != "checksums.json" and random.random() < 0.7:
        (folder / "checksums.json").unlink()  # as if the file had been changed on purpose
    way = random.choice(("field", "field", "field", "field", "bytes", "cut", "other"))
    if name == WEIGHTS:
        return _spoil_weights(path, random, way)
    if way == "field":
        return f"{name}: {_spoil_field(path, random)}"
    return f"{name}: {_spoil_bytes(path, random, way)}"


def _spoil_bytes(path: Path, random: Random, way: str) -> str:
    content = path.read_bytes()
    if way == "cut":
        size = random.randrange(len(content))
        path.write_bytes(content[:size])
        return f"cut to {size} bytes"
    if way == "bytes":
        place, byte = random.randrange(len(content)), random.randrange(256)
        path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        return f"byte {place} is {byte}"
    other = random.choice(OTHER)
    path.write_bytes(other)
    return f"is {other[:20]!r}"


def _spoil_field(path: Path, random: Random) -> str:
    content = json.loads(path.read_text(encoding="utf-8"))
    place, name = content, random.choice([*content, *MORE_FIELDS[path.name]])
    steps = [name]
    while isinstance(place.get(name), dict) and place[name] and random.random() < 0.7:
        place = place[name]
        name = random.choice(list(place))
        steps.append(name)
    if name in place and random.random() < 0.2:
        del place[name]
        value = "gone"
    else:
        value = place[name] = random.choice(VALUES)
    path.write_text(json.dumps(content), encoding="utf-8")
    return f"{'.'.join(steps)} is {str(value)[:60]}"


def _spoil_weights(path: Path, random: Random, way: str) -> str:
    """The header of a safetensors file is 8 bytes of its length and JSON."""
    if way in ("cut", "other"):
        return f"{path.name}: {_spoil_bytes(path, random, way)}"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    if way == "bytes":
        place, byte = random.randrange(8 + length), random.randrange(256)
        path.write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
        return f"{path.name}: byte {place} is {byte}"
    header = json.loads(content[8 : 8 + length])
    tensor = random.choice(list(header))
    field = random.choice(("dtype", "shape", "data_offsets", "name", "gone"))
    entry = header.pop(tensor)
    value = random.choice((*VALUES, "F16", "BF16", "I64", "BOOL", [0, 4], [1], [10**9, 10**9]))
    if field == "name":
        header["x"] = entry
    elif field != "gone":
        header[tensor] = {**entry, field: value}
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + content[8 + length :])
    return f"{path.name}: {tensor}.{field} is {str(value)[:60]}"
