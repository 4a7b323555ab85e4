"""LLMem: decoder-only fine-tuning on one GPU (Kim et al., IJCAI 2024, arXiv 2404.10933; its `size_estimator.py`).

It assumes what its authors used: Colossal-AI's chunks (16-bit weights whose memory the gradients reuse, and float32
copies), Adam, gradient checkpointing (one output kept for each decoder layer), and logits that exist three times at the
loss. Each tensor is rounded up to 2 MiB. Several GPUs are not covered: the paper's other formulas are for its own
distributed set-ups.
"""

from __future__ import annotations

from functools import partial

from carma.trial.layers.description import Described
from gpumemnet.published.common import CONTEXT_MIB, MIB, Found, Parts, Published, of_model, parameters_of

_DECODERS = (
    "bloom biogpt codegen cohere cohere2 ctrl deepseek_v2 deepseek_v3 falcon gemma gemma2 gemma3_text glm glm4 "
    "gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite llama mistral mixtral mpt olmo olmo2 openai-gpt opt persimmon phi "
    "phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2 xglm"
)
DECODERS = frozenset(_DECODERS.split())
_FULL_LOGITS = frozenset({"codegen", "gpt_neo"})  # these compute the head in float32, as the authors note
_HALF, _FULL, _TOKEN = 2, 4, 8  # bytes of a value, and of a token's number
_ROUND = 2 * MIB
_CHUNK_VALUES = 32 << 20  # Colossal-AI searches chunk sizes from 32 Mi values up
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "vocabulary": ("vocab_size",),
}


@of_model
def _llmem(described: Described, gpus: int) -> Found:
    if reason := _refusal(described, gpus):
        return reason
    parts = _model_parts(described) | _output_parts(described)
    return Parts(parts, _warnings(described), fixed_mib={"context": CONTEXT_MIB})


def _refusal(described: Described, gpus: int) -> str | None:
    kind = described.config.get("model_type", "")
    if not kind:
        return (
            "it is for decoder-only models of Hugging Face transformers, and nothing here names one (no summary does)"
        )
    if kind not in DECODERS:
        return f"it supports decoder-only language models; the model type {kind} is unknown to it"
    if gpus > 1:
        return "its formulas for several GPUs hold for Colossal-AI's own set-ups only"
    if not _tokens(described):
        return "the batch and the length of the sequences are not known"
    missing = [name for name in _NAMES if _config(described, name) is None]
    return f"the model's configuration does not tell its {', '.join(missing)}" if missing else None


def _tokens(described: Described) -> tuple[int, ...]:
    """Batch and length. Trainers pass the tokens by name, which a trial does not see: then the output of the first
    embedding determines them."""
    if len(described.input) == 2:
        return described.input
    embedded = (layer.output[:2] for layer in described.layers if "Embedding" in layer.kind and len(layer.output) == 3)
    return next(embedded, ())


def _config(described: Described, name: str) -> int | None:
    for key in _NAMES[name]:
        value = described.config.get(key, "")
        if value.isascii() and value.isdigit() and int(value) > 0:
            return int(value)
    return None


def _model_parts(described: Described) -> dict[str, int]:
    matrices = [layer.parameters for layer in described.layers if _counted(layer.kind) and layer.parameters]
    # The authors leave the moments of the last matrix (the head) out and add its 16-bit bytes instead.
    moments = sum(2 * _rounded(_FULL * count) for count in matrices[:-1])
    head = _rounded(_HALF * matrices[-1]) if matrices else 0
    chunk = max([_CHUNK_VALUES, *matrices])
    held = -(-parameters_of(described) // chunk) * chunk
    return {"weights": _HALF * held + head, "float32 weights": _FULL * held, "optimizer": moments}


def _counted(kind: str) -> bool:
    return "Embedding" in kind or kind in ("Linear", "Conv1D")


def _output_parts(described: Described) -> dict[str, int]:
    batch, length = _tokens(described)
    hidden, layers, vocabulary = (_config(described, name) or 0 for name in _NAMES)
    each = _FULL if described.config.get("model_type") in _FULL_LOGITS else _HALF
    outputs = (layers + 2) * _rounded(_HALF * batch * length * hidden)  # tokens, positions, and each layer
    logits = _rounded(each * batch * length * vocabulary)
    shifted = _rounded(each * batch * (length - 1) * vocabulary)
    return {"input": _rounded(_TOKEN * batch * length), "activations": outputs, "logits": logits + 2 * shifted}


def _rounded(count: int) -> int:
    return -(-count // _ROUND) * _ROUND


def _warnings(described: Described) -> tuple[str, ...]:
    found = ["takes Colossal-AI's 16-bit training in chunks with Adam for granted"]
    if not described.checkpointing:
        found.append("takes gradient checkpointing for granted, which this script does not use; far too little then")
    if described.dtype == "float32" and not described.autocast:
        found.append("this script trains in float32; the method knows 16-bit training only")
    return tuple(found)


make = partial(Published, "llmem", _llmem)
