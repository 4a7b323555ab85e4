"""transformers models built from configurations, with random weights: nothing is downloaded."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch

GPT2 = ("GPT2Config", "GPT2LMHeadModel", "causal")
LLAMA = ("LlamaConfig", "LlamaForCausalLM", "causal")
BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


def decoder(width: int, layers: int, heads: int, groups: int, vocabulary: int = 32000) -> dict[str, Any]:
    """The settings that llama-like configurations share."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": (width * 8 // 3 + 127) // 128 * 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
    }


# name: configuration class, model class, what goes in, settings away from the configuration's defaults
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "hf-bert-mlm": ("BertConfig", "BertForMaskedLM", "token", {}),
    "hf-bert-cls": ("BertConfig", "BertForSequenceClassification", "classify", {}),
    "hf-bert-large-mlm": ("BertConfig", "BertForMaskedLM", "token", BERT_LARGE),
    "hf-roberta-mlm": ("RobertaConfig", "RobertaForMaskedLM", "token", {"max_position_embeddings": 1026}),
    "hf-roberta-cls": ("RobertaConfig", "RobertaForSequenceClassification", "classify", {}),
    "hf-distilbert-mlm": ("DistilBertConfig", "DistilBertForMaskedLM", "token", {}),
    "hf-distilbert-cls": ("DistilBertConfig", "DistilBertForSequenceClassification", "classify", {}),
    "hf-albert-mlm": ("AlbertConfig", "AlbertForMaskedLM", "token", {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
    }),
    "hf-electra-cls": ("ElectraConfig", "ElectraForSequenceClassification", "classify", {
        "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "embedding_size": 768,
    }),
    "hf-electra-token": ("ElectraConfig", "ElectraForTokenClassification", "few", {}),
    "hf-deberta-cls": ("DebertaV2Config", "DebertaV2ForSequenceClassification", "classify", {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "relative_attention": True, "position_buckets": 256, "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "max_relative_positions": -1,
        "position_biased_input": False,
    }),
    "hf-deberta-token": ("DebertaV2Config", "DebertaV2ForTokenClassification", "few", {
        "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536,
    }),
    "hf-gpt2": (*GPT2, {}),
    "hf-gpt2-medium": (*GPT2, {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "hf-gpt2-large": (*GPT2, {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "hf-gpt-neo": ("GPTNeoConfig", "GPTNeoForCausalLM", "causal", {
        "hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]],
    }),
    "hf-gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", "causal", {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    }),
    "hf-opt": ("OPTConfig", "OPTForCausalLM", "causal", {}),
    "hf-opt-350m": ("OPTConfig", "OPTForCausalLM", "causal", {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "ffn_dim": 4096,
    }),
    "hf-llama-110m": (*LLAMA, decoder(768, 12, 12, 12)),
    "hf-llama-350m": (*LLAMA, decoder(1024, 24, 16, 8)),
    "hf-llama-700m": (*LLAMA, decoder(1536, 20, 16, 16)),
    "hf-mistral": ("MistralConfig", "MistralForCausalLM", "causal", decoder(1024, 12, 16, 4)),
    "hf-qwen2": ("Qwen2Config", "Qwen2ForCausalLM", "causal", decoder(896, 24, 14, 2, 151936)),
    "hf-gemma": ("GemmaConfig", "GemmaForCausalLM", "causal", {**decoder(1024, 8, 8, 1, 128000), "head_dim": 128}),
    "hf-phi": ("PhiConfig", "PhiForCausalLM", "causal", decoder(1024, 16, 16, 16)),
    "hf-t5-small": ("T5Config", "T5ForConditionalGeneration", "seq2seq", {"decoder_start_token_id": 0}),
    "hf-t5-base": ("T5Config", "T5ForConditionalGeneration", "seq2seq", {
        "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "decoder_start_token_id": 0,
    }),
    "hf-bart-base": ("BartConfig", "BartForConditionalGeneration", "seq2seq", {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
        "encoder_attention_heads": 12, "decoder_attention_heads": 12,
    }),
    "hf-marian": ("MarianConfig", "MarianMTModel", "seq2seq", {
        "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": 58101, "pad_token_id": 58100,
        "decoder_start_token_id": 58100,
    }),
    "hf-xlnet": ("XLNetConfig", "XLNetForSequenceClassification", "classify", {
        "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072,
    }),
    "hf-vit": ("ViTConfig", "ViTForImageClassification", "image", {}),
    "hf-deit": ("DeiTConfig", "DeiTForImageClassification", "image", {
        "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536,
    }),
    "hf-beit": ("BeitConfig", "BeitForImageClassification", "image", {"use_relative_position_bias": True}),
    "hf-swin": ("SwinConfig", "SwinForImageClassification", "image", {}),
    "hf-convnextv2": ("ConvNextV2Config", "ConvNextV2ForImageClassification", "image", {}),
    "hf-dinov2": ("Dinov2Config", "Dinov2ForImageClassification", "image", {
        "hidden_size": 384, "num_attention_heads": 6,
    }),
    "hf-resnet": ("ResNetConfig", "ResNetForImageClassification", "image", {}),
    "hf-segformer-b0": ("SegformerConfig", "SegformerForSemanticSegmentation", "segment", {}),
    "hf-segformer-b2": ("SegformerConfig", "SegformerForSemanticSegmentation", "segment", {
        "depths": [3, 4, 6, 3], "hidden_sizes": [64, 128, 320, 512], "decoder_hidden_size": 768,
    }),
    "hf-whisper-tiny": ("WhisperConfig", "WhisperForConditionalGeneration", "speech", {}),
    "hf-whisper-base": ("WhisperConfig", "WhisperForConditionalGeneration", "speech", {
        "d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
        "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
    }),
    "hf-wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", "audio", {
        "apply_spec_augment": False, "num_labels": 12,
    }),
    "hf-hubert": ("HubertConfig", "HubertForSequenceClassification", "audio", {
        "apply_spec_augment": False, "num_labels": 12,
    }),
    "hf-clip": ("CLIPConfig", "CLIPModel", "pair", {}),
}  # fmt: skip


def make(name: str, args: argparse.Namespace) -> tuple[Any, Any, Any] | None:
    if name not in MODELS:
        return None
    importlib.import_module("models_vision").import_torchvision()  # transformers looks for it
    library = importlib.import_module("transformers")
    config_name, model_name, kind, settings = MODELS[name]
    settings = dict(settings)
    if kind in ("image", "segment") and hasattr(getattr(library, config_name)(), "image_size"):
        settings["image_size"] = args.size
    if kind in ("image", "segment"):
        settings["num_labels"] = 150 if kind == "segment" else 1000
    if kind in ("token", "classify", "few", "causal") and args.seq > 510:
        settings.setdefault("max_position_embeddings", 2048)
    if kind == "few":
        settings["num_labels"] = 9
    config = getattr(library, config_name)(**settings)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = getattr(library, model_name)(config)
    return model, lambda n: make_batch(kind, n, config, args), lambda model, batch: model(**batch).loss


def make_batch(kind: str, n: int, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    match kind:
        case "image":
            return {"pixel_values": torch.randn(n, 3, args.size, args.size), "labels": torch.randint(0, 1000, (n,))}
        case "segment":
            labels = torch.randint(0, 150, (n, args.size, args.size))
            return {"pixel_values": torch.randn(n, 3, args.size, args.size), "labels": labels}
        case "speech":  # 30 s of 10 ms frames, which is what the encoder's positions are made for
            features = torch.randn(n, config.num_mel_bins, 2 * config.max_source_positions)
            return {"input_features": features, "labels": torch.randint(0, config.vocab_size, (n, min(args.seq, 440)))}
        case "audio":
            return {"input_values": torch.randn(n, args.size), "labels": torch.randint(0, 12, (n,))}
        case "pair":
            size = config.vision_config.image_size
            tokens = torch.randint(0, config.text_config.vocab_size, (n, 77))
            return {"input_ids": tokens, "pixel_values": torch.randn(n, 3, size, size), "return_loss": True}
        case _:
            return text_batch(kind, n, config, args)


def text_batch(kind: str, n: int, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens and labels; with padding, a mask of lengths from a half to the whole, and labels that skip the rest."""
    tokens = torch.randint(3, config.vocab_size - 1, (n, args.seq))
    batch = {"input_ids": tokens}
    mask = torch.ones_like(tokens)
    if args.padding:
        lengths = torch.randint(args.seq // 2, args.seq + 1, (n, 1))
        mask = (torch.arange(args.seq)[None, :] < lengths).long()
        batch["attention_mask"] = mask
    if kind == "classify":
        batch["labels"] = torch.randint(0, 2, (n,))
    elif kind == "few":
        batch["labels"] = torch.randint(0, 9, (n, args.seq)).masked_fill(mask == 0, -100)
    elif kind == "seq2seq":
        batch["labels"] = torch.randint(3, config.vocab_size - 1, (n, max(1, args.seq // 2)))
    else:
        batch["labels"] = tokens.masked_fill(mask == 0, -100)
    return batch
