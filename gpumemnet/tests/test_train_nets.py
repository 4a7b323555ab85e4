"""The nets: quantiles in order, attention over the layers of one model and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from gpumemnet.serving.model import Merged, merge
from gpumemnet.training.samples import MEDIAN, QUANTILES, Samples, Scale
from gpumemnet_fixtures.layer_lists import unmerged
from gpumemnet_fixtures.training_data import made

if TYPE_CHECKING:
    from gpumemnet.training.attention import Attention


@pytest.fixture(scope="module")
def samples() -> Samples:
    return made(24)


@pytest.fixture(scope="module")
def net(samples: Samples) -> Attention:
    import torch

    from gpumemnet.training.attention import Attention

    torch.manual_seed(0)
    made_net = Attention(samples.scalars, np.concatenate(samples.tokens), 64.0, blocks=2)
    made_net.eval()
    return made_net


def ask(net: Attention, samples: Samples, row: int, layers: Merged, padding: int = 0) -> np.ndarray:
    import torch

    kinds = np.pad(layers.kinds, ((0, padding), (0, 0)))
    tokens = np.pad(layers.tokens, ((0, padding), (0, 0), (0, 0)), constant_values=9.0)
    weights = np.pad(layers.weights, (0, padding))
    fed = [torch.from_numpy(one[None]) for one in (samples.scalars[row], kinds, tokens, weights)]
    with torch.no_grad():
        found: np.ndarray = net(*fed).numpy()[0]
    return found


def test_quantiles_never_cross() -> None:
    import torch

    from gpumemnet.training.fit import quantiles

    raw = torch.randn(200, len(QUANTILES), generator=torch.Generator().manual_seed(0)) * 10
    assert (quantiles(raw).diff(dim=-1) >= 0).all()
    assert torch.equal(quantiles(raw)[:, MEDIAN], raw[:, MEDIAN])


def test_the_loss_is_least_at_the_quantiles() -> None:
    import torch

    from gpumemnet.training.fit import pinball

    truth = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    right = torch.quantile(truth, torch.tensor(QUANTILES))
    least = pinball(right.expand(len(truth), -1), truth)
    for place in range(len(QUANTILES)):
        for off in (-0.1, 0.1):
            moved = right.clone()
            moved[place] += off
            assert pinball(moved.expand(len(truth), -1), truth) > least


def test_a_constant_column_becomes_zero() -> None:
    import torch

    from gpumemnet.training.fit import Scaling

    scaled = Scaling(np.array([[1, 5], [3, 5]], np.float32))(torch.tensor([[2.0, 7.0], [3.0, 5.0]]))
    assert scaled.tolist() == [[0.0, 0.0], [1.0, 0.0]]


def test_the_scale_is_invertible(samples: Samples) -> None:
    scale = Scale.of(samples)
    back = scale.to_mib(scale.to_z(samples)[:, None], samples)[:, 0]
    np.testing.assert_allclose(back, samples.footprint_mib, rtol=1e-9)


def test_equal_layers_are_merged_and_counted() -> None:
    kinds = np.array([0, 6] * 10, np.int64)
    tokens = np.tile(np.array([[1, 2, 3, 4, 5, 0], [1, 0, 3, 4, 5, 1]], np.float32), (10, 1))
    found = merge(kinds, tokens)
    assert sorted(found.weights.tolist()) == [1.0, 1.0, 9.0, 9.0]  # the first and the last have other neighbours


def test_attention_over_merged_layers_is_attention_over_all(net: Attention, samples: Samples) -> None:
    row = int(np.argmax(samples.layer_counts))
    kinds, tokens = samples.kinds[row], samples.tokens[row]
    repeated = np.tile(kinds, 4), np.tile(tokens, (4, 1))
    few, every = merge(*repeated), unmerged(*repeated)
    assert len(few.weights) < len(every.weights)
    np.testing.assert_allclose(ask(net, samples, row, few), ask(net, samples, row, every), atol=1e-4)


def test_a_model_is_judged_by_itself_whatever_else_is_in_the_batch(net: Attention, samples: Samples) -> None:
    import torch

    from gpumemnet.training.fit import Packed, ask_layers

    layers, scalars = Packed.of(samples), torch.from_numpy(samples.scalars)
    together = ask_layers(net, scalars, layers).numpy()
    for row in range(len(samples)):
        alone = ask(net, samples, row, merge(samples.kinds[row], samples.tokens[row]))
        np.testing.assert_allclose(together[row], alone, atol=1e-4)


def test_padding_changes_nothing(net: Attention, samples: Samples) -> None:
    layers = merge(samples.kinds[0], samples.tokens[0])
    np.testing.assert_allclose(ask(net, samples, 0, layers), ask(net, samples, 0, layers, padding=40), atol=1e-4)


def test_the_layers_and_their_order_count(net: Attention, samples: Samples) -> None:
    row = int(np.argmax(samples.layer_counts))
    kinds, tokens = samples.kinds[row], samples.tokens[row]
    as_it_is = ask(net, samples, row, merge(kinds, tokens))
    order = np.roll(np.arange(len(kinds)), len(kinds) // 2)[::-1]
    assert np.abs(ask(net, samples, row, merge(kinds[order], tokens[order])) - as_it_is).max() > 1e-4
    larger = tokens.copy()
    larger[0] += 1.0
    assert np.abs(ask(net, samples, row, merge(kinds, larger)) - as_it_is).max() > 1e-4


def test_batches_hold_every_row_once(samples: Samples) -> None:
    import torch

    from gpumemnet.training.fit import Packed, batches

    rows = torch.arange(5, 20)
    cut = batches(Packed.of(samples).lengths, rows, 4, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(list(cut)).tolist()) == rows.tolist()


def test_graphs_of_a_batch_do_not_touch(samples: Samples) -> None:
    import torch

    from gpumemnet.training.graph import GraphNet, Graphs

    torch.manual_seed(0)
    net = GraphNet(samples.scalars, np.concatenate(samples.tokens)).eval()
    with torch.no_grad():
        together = net(Graphs.of(samples))
        alone = torch.cat([net(Graphs.of(samples.take(np.array([row])))) for row in range(len(samples))])
    np.testing.assert_allclose(together.numpy(), alone.numpy(), atol=1e-4)


def test_of_many_sources_the_last_count() -> None:
    from gpumemnet.training.graph import nearest

    edges = np.array([[0, 1, 2, 3, 4, 0, 5], [5, 5, 5, 5, 5, 1, 6]])
    found = nearest(edges, most=2)
    assert sorted(zip(*found.tolist(), strict=True)) == [(0, 1), (3, 5), (4, 5), (5, 6)]


def test_edges_count(samples: Samples) -> None:
    import torch

    from gpumemnet.training.graph import GraphNet, Graphs

    torch.manual_seed(0)
    net = GraphNet(samples.scalars, np.concatenate(samples.tokens)).eval()
    without = Samples(**{**vars(samples), "edges": tuple(edge[:, :1] for edge in samples.edges)})
    with torch.no_grad():
        assert (net(Graphs.of(samples)) - net(Graphs.of(without))).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("family", "classes", "parameters"), [("mlp", 5, 2_693), ("cnn", 6, 4_228), ("transformer", 6, 2_870)]
)
def test_the_published_recipe_has_the_published_number_of_parameters(
    family: str, classes: int, parameters: int
) -> None:
    from gpumemnet.training.published_recipe import Mean

    net = Mean(family, classes)  # type: ignore[arg-type]
    assert sum(one.numel() for one in net.parameters()) == parameters


def test_the_published_features_are_unscaled(samples: Samples) -> None:
    from gpumemnet.training.published_recipe import COLUMNS, columns

    found = columns(samples).numpy()
    batch = found[:, COLUMNS["mlp"].index("batch")]
    assert batch.max() > 100
    np.testing.assert_allclose(batch, batch.round(), rtol=1e-4)
