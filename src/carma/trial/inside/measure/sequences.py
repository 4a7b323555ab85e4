"""Measures attention and recurrent networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .meter import DTYPES, ITEM_BYTES, Meter, Row, forward_backward


def heads_tensor(params: Row, meter: Meter, heads: int, length: int) -> Any:
    """A query, key or value; models mostly make it by a transposition, and the kernels copy or not after that."""
    where = {"device": meter.device, "dtype": DTYPES[params["dtype"]], "requires_grad": True}
    if params["transposed_input"]:
        return torch.ones(params["n"], length, heads, params["head_dim"], **where).transpose(1, 2)
    return torch.ones(params["n"], heads, length, params["head_dim"], **where)


def attention(params: Row, meter: Meter) -> list[Row]:
    """Forward and backward; the row's grad_fn names the implementation that torch chose."""
    query = heads_tensor(params, meter, params["heads"], params["length"])
    key = heads_tensor(params, meter, params["kv_heads"], params["kv_length"])
    value = heads_tensor(params, meter, params["kv_heads"], params["kv_length"])
    mask = None
    shape = (params["n"], 1, params["length"], params["kv_length"])
    if params["mask"] == "bool":
        mask = torch.ones(shape, device=meter.device, dtype=torch.bool)
    elif params["mask"] != "none":
        heads = params["heads"] if params["mask"] == "float_heads" else 1
        mask = torch.zeros((shape[0], heads, *shape[2:]), device=meter.device, dtype=query.dtype)
    options: dict[str, Any] = {"enable_gqa": True} if params["kv_heads"] != params["heads"] else {}
    return forward_backward(
        meter,
        lambda: F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=params["dropout"], is_causal=params["causal"], **options
        ),
        [query, key, value],
    )


def recurrent(params: Row, meter: Meter) -> list[Row]:
    """Weights as they are moved and flattened, then forward (its kept bytes hold the reserve) and backward."""
    torch.backends.cudnn.allow_tf32 = params["tf32"]
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    options: dict[str, Any] = {}
    if params["projection"] and params["cell"] == "LSTM" and params["hidden"] > 16:
        options["proj_size"] = params["hidden"] // 2
    module = getattr(torch.nn, params["cell"])(
        params["inputs"],
        params["hidden"],
        params["layers"],
        batch_first=params["batch_first"],
        dropout=params["dropout"] if params["layers"] > 1 else 0.0,
        bidirectional=params["bidirectional"],
        **options,
    )
    dtype = DTYPES[params["dtype"]]
    weight_bytes = sum(p.numel() for p in module.parameters()) * ITEM_BYTES[params["dtype"]]
    moved = meter.read(lambda: module.to(device=meter.device, dtype=dtype) and None)
    batch, length = params["n"], params["length"]
    shape = (batch, length) if params["batch_first"] else (length, batch)
    x = torch.ones(*shape, params["inputs"], device=meter.device, dtype=dtype, requires_grad=True)
    given: Any = x
    if params["packed"]:
        lengths = torch.tensor([max(1, length - (i * length) // (2 * batch)) for i in range(batch)])
        given = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=params["batch_first"])
    rows = forward_backward(meter, lambda: module(given), [x, *module.parameters()])
    return [{**row, "weight_bytes": weight_bytes} for row in [moved.row("move"), *rows]]
