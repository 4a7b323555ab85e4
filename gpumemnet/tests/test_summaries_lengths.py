"""What is found of a printed language model for one length is found for every other: nothing hangs on the number."""

from __future__ import annotations

import pytest

from carma.errors import Usage
from carma.trial.layers.description import Described
from gpumemnet.summaries import read_text

LLAMA = """\
LlamaForCausalLM(
  (model): LlamaModel(
    (embed_tokens): Embedding(32000, 256)
    (layers): ModuleList(
      (0-1): 2 x LlamaDecoderLayer(
        (self_attn): LlamaAttention(
          (q_proj): Linear(in_features=256, out_features=256, bias=False)
          (k_proj): Linear(in_features=256, out_features=64, bias=False)
          (v_proj): Linear(in_features=256, out_features=64, bias=False)
          (o_proj): Linear(in_features=256, out_features=256, bias=False)
        )
        (mlp): LlamaMLP(
          (gate_proj): Linear(in_features=256, out_features=512, bias=False)
          (up_proj): Linear(in_features=256, out_features=512, bias=False)
          (down_proj): Linear(in_features=512, out_features=256, bias=False)
          (act_fn): SiLUActivation()
        )
        (input_layernorm): LlamaRMSNorm((256,), eps=1e-05)
        (post_attention_layernorm): LlamaRMSNorm((256,), eps=1e-05)
      )
    )
    (norm): LlamaRMSNorm((256,), eps=1e-05)
    (rotary_emb): LlamaRotaryEmbedding()
  )
  (lm_head): Linear(in_features=256, out_features=32000, bias=False)
)
"""
GPT2 = """\
GPT2LMHeadModel(
  (transformer): GPT2Model(
    (wte): Embedding(50257, 128)
    (wpe): Embedding(1024, 128)
    (drop): Dropout(p=0.1, inplace=False)
    (h): ModuleList(
      (0-1): 2 x GPT2Block(
        (ln_1): LayerNorm((128,), eps=1e-05, elementwise_affine=True)
        (attn): GPT2Attention(
          (c_attn): Conv1D(nf=384, nx=128)
          (c_proj): Conv1D(nf=128, nx=128)
          (attn_dropout): Dropout(p=0.1, inplace=False)
          (resid_dropout): Dropout(p=0.1, inplace=False)
        )
        (ln_2): LayerNorm((128,), eps=1e-05, elementwise_affine=True)
        (mlp): GPT2MLP(
          (c_fc): Conv1D(nf=512, nx=128)
          (c_proj): Conv1D(nf=128, nx=512)
          (act): NewGELUActivation()
          (dropout): Dropout(p=0.1, inplace=False)
        )
      )
    )
    (ln_f): LayerNorm((128,), eps=1e-05, elementwise_affine=True)
  )
  (lm_head): Linear(in_features=128, out_features=50257, bias=False)
)
"""
SENTENCES = """\
TextCNN(
  (words): Embedding(1000, 64)
  (first): Conv1d(64, 32, kernel_size=(3,), stride=(1,), padding=(1,))
  (second): Conv1d(64, 32, kernel_size=(5,), stride=(1,), padding=(2,))
  (third): Conv1d(32, 64, kernel_size=(1,), stride=(1,))
)
"""
STRANGE = 1009  # a prime that is no width
LENGTHS = sorted({*range(1, 140), *(n + off for n in (192, 256, 384, 512, 768, 1024, 2048) for off in (-1, 0, 1))})


def outputs(text: str, length: int) -> list[tuple[int, ...]]:
    return [layer.output for layer in read_text(text, batch=3, sample=(length,)).described.layers]


@pytest.mark.parametrize("text", [LLAMA, GPT2, SENTENCES], ids=["llama", "gpt2", "convolutions over words"])
def test_every_length_gives_the_same_shapes_but_for_itself(text: str) -> None:
    """Half the width was once taken for branches that are joined."""
    strange = outputs(text, STRANGE)
    for length in LENGTHS:
        wanted = [tuple(length if size == STRANGE else size for size in shape) for shape in strange]
        assert outputs(text, length) == wanted, length
        assert not any("joined" in remark for remark in read_text(text, sample=(length,)).remarks), length


def by_name(model: Described) -> dict[str, tuple[int, ...]]:
    return {layer.name: layer.output for layer in model.layers}


def test_words_of_which_branches_are_convolved() -> None:
    assert list(by_name(read_text(SENTENCES, sample=(20,)).described).values()) == [
        (1, 20, 64),
        (1, 32, 20),
        (1, 32, 20),
        (1, 64, 20),
    ]


def test_rows_are_flattened_where_nothing_else_fits() -> None:
    words = "(words): Embedding(1000, 16)"
    text = f"Net(\n  {words}\n  (head): Linear(in_features=80, out_features=4, bias=True)\n)"
    assert by_name(read_text(text, sample=(5,)).described) == {"words": (1, 5, 16), "head": (1, 4)}
    image = "Net(\n  (0): Linear(in_features=784, out_features=4, bias=True)\n)"
    assert by_name(read_text(image, sample=(28, 28)).described) == {"0": (1, 4)}


def test_rows_that_are_no_words() -> None:
    """The same decoder fed with vectors: no table of words tells that these are rows."""
    text = "\n".join(line for line in LLAMA.splitlines() if "embed_tokens" not in line)
    strange = read_text(text, sample=(STRANGE, 256)).described.layers
    for length in (32, 64, 127, 128, 129, 256, 512):
        wanted = [tuple(length if size == STRANGE else size for size in layer.output) for layer in strange]
        assert [layer.output for layer in read_text(text, sample=(length, 256)).described.layers] == wanted


def test_numbers_of_words_are_nothing_that_a_layer_takes() -> None:
    text = "Net(\n  (words): Embedding(1000, 16)\n  (head): Linear(in_features=5, out_features=4, bias=True)\n)"
    for length in (5, 6):
        with pytest.raises(Usage, match=r"line 3 .* 5 features"):
            read_text(text, sample=(length,))


def test_the_height_of_an_image_whose_places_are_rows_is_no_channel() -> None:
    block = """\
    (%d): Block(
      (norm): LayerNorm((96,), eps=1e-05, elementwise_affine=True)
      (qkv): Linear(in_features=96, out_features=288, bias=True)
      (proj): Linear(in_features=96, out_features=96, bias=True)
    )
"""
    stem = "  (stem): Conv2d(3, 96, kernel_size=(4, 4), stride=(4, 4))\n"
    text = f"Net(\n{stem}  (blocks): Sequential(\n{block % 0}{block % 1}  )\n)\n"
    for side in (24, 32, 47, 48, 49, 96):  # twice 48 is the width
        layers = read_text(text, sample=(3, 4 * side, 4 * side)).described.layers
        wide = [(1, side * side, width) for width in (96, 288, 96)]
        assert [layer.output for layer in layers[1:]] == wide * 2, side
