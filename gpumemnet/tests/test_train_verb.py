"""`carma train` as a user meets it: data in, figures, pictures and errors out."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from carma.cli import main
from carma.errors import Usage
from gpumemnet.dataset.layer_lists import Lister
from gpumemnet.dataset.pack import pack
from gpumemnet.training import accuracy_report as report
from gpumemnet.training.cross_validation import Answers, Job, Tell, answer
from gpumemnet.training.samples import Samples, read_public, read_table, read_tables
from gpumemnet_fixtures.dataset_rows import config, row, write_configs, write_rows
from gpumemnet_fixtures.dataset_rows import quick_listing as quick_listing

HEAD = ("Filename", "Activations-Params", "Total Parameters", "Batch Size", "Max GPU Memory (MiB)")


def write_public(path: Path, rows: int) -> Path:
    """As the public file has them, made up."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        written = csv.writer(file)
        written.writerow(HEAD)
        for _ in range(rows):
            wide, batch = int(rng.integers(16, 3_000)), int(rng.integers(4, 1_000))
            layers = [
                ("linear", wide, 100 * wide + wide),
                ("batch_normalization", wide, 2 * wide),
                ("Softplus", wide, 0),
            ]
            layers += [("dropout", wide, 0), ("linear", wide, wide * wide + wide), ("Softmax", wide, 0)]
            parameters = sum(each[2] for each in layers)
            used = 1_443 + round(20 * parameters / 2**20)
            name = f"input:100_output:{wide}_depth:2_arch:uniform_batch:{batch}_act:softplus.out"
            written.writerow((name, str(layers), parameters, batch, used))
    return path


@pytest.fixture
def public(tmp_path: Path) -> Path:
    return write_public(tmp_path / "public.csv", 90)


def test_the_public_data_becomes_samples(public: Path) -> None:
    samples = read_public(public)
    assert (len(samples), samples.family, set(samples.shapes)) == (90, "mlp", {"uniform"})
    assert samples.layer_counts.tolist() == [6] * 90
    assert samples.footprint_mib.min() >= 1_443
    assert samples.edges[0].tolist() == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]
    assert list(samples.origin.data_sha256) == ["public.csv"]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ",".join(HEAD) + "\nx,y,1,1,1\n"])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text(text)
    with pytest.raises(Usage, match="not the public MLP data"):
        read_public(tmp_path / "other.csv")


def test_a_packed_file_becomes_samples(tmp_path: Path) -> None:
    configs = [config(f"mlp-{place}", batch=place + 2) for place in range(4)]
    rows = [row("mlp-0"), row("mlp-1", 200.0), row("mlp-2"), row("mlp-3", oom=True, alone=True, footprint=None)]
    files = write_configs(tmp_path / "c.jsonl", *configs), write_rows(tmp_path / "r.jsonl", *rows)
    pack(files[0], [files[1]], tmp_path, Lister(sys.executable, tmp_path / "l.jsonl", 1))
    samples = read_table(tmp_path / "mlp.parquet")
    assert samples.footprint_mib.tolist() == [624.0, 724.0, 624.0]
    assert samples.left_out == {"out of memory": 1}
    assert (samples.origin.gpu, samples.origin.torch) == ("NVIDIA H200", "2.13.0")
    assert samples.edges[0].shape[0] == 2
    with pytest.raises(Usage, match="second file of the family mlp"):
        read_tables([tmp_path / "mlp.parquet", tmp_path / "mlp.parquet"])


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folds are judged here: test_train_learning has processes that give the same answers."""

    def compete(samples: Mapping[str, Samples], jobs: Sequence[Job], tell: Tell) -> Iterator[Answers]:
        for done, job in enumerate(jobs, 1):
            tell(f"{done}/{len(jobs)}")
            yield answer(job, samples[job.data])

    monkeypatch.setattr("gpumemnet.training.main.compete", compete)


@pytest.mark.usefixtures("in_this_process")
def test_judging_writes_figures_and_pictures(public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures"
    words = ["train", "--public-mlp", str(public), "--evaluate", "--only", "extra-trees", "--report", str(out)]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "public-mlp   extra-trees        3 folds          1 GB" in said.out
    assert "3/3" in said.err or "6/6" in said.err
    found = report.read(out / "accuracy.json")
    (entry,) = (one for one in found.entries if one.protocol == "folds")
    assert (entry.data, entry.learner, entry.rows) == ("public-mlp", "extra-trees", 90)
    assert {(one.point, one.classes.width_gb) for one in entry.judged} == {
        (point, width) for point in ("median", "operating", "careful") for width in (1, 2)
    }
    for one in entry.judged:
        assert sum(map(sum, one.classes.confusion)) == 90
        assert list(one.of_split) == ["fold 1", "fold 2", "fold 3"]
    assert entry.errors is not None
    assert found.data["public-mlp"].sha256.keys() == {"public.csv"}
    assert str(tmp_path) not in found.command  # a path of one machine says nothing
    assert sorted(path.name for path in out.iterdir()) == [
        "accuracy.json",
        *(f"confusion-public-mlp-{width}gb.{kind}" for width in (1, 2) for kind in ("png", "svg")),
    ]


@pytest.mark.usefixtures("in_this_process")
def test_figures_as_json(public: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--public-mlp", str(public), "--evaluate", "--no-shapes", "--only", "extra-trees", "--json"]
    assert main([*words, "--report", str(tmp_path)]) == 0
    assert [entry["protocol"] for entry in json.loads(capsys.readouterr().out)["entries"]] == ["folds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x.parquet"], "there is nothing to do"),
        (["--evaluate"], "there is no data to learn from"),
        (["--evaluate", "--only", "oracle"], "'oracle' is not one of mlp-based"),
        (["--evaluate", "--families", "rnn"], "'rnn' is not one of mlp, cnn, transformer"),
        (["--evaluate", "--only", ""], "'' is not one of mlp-based"),
        (["nowhere.parquet", "--out", "models"], "nowhere.parquet cannot be read"),
        (["--evaluate", "--public-mlp", "nowhere.csv"], "nowhere.csv cannot be read"),
        (["x.parquet", "--out", "m", "--only", "extra-trees,boosted"], "of extra-trees, boosted there are no models"),
        (["--out", "m", "--public-mlp", "nowhere.csv"], "there is no data to make models for m from"),
    ],
)
def test_wrong_arguments_are_errors(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumemnet.cli.train.EXTRA", ("torch", "no-such-package"))
    monkeypatch.setattr("gpumemnet.cli.train.MODULES", {"no-such-package": "no_such_module"})
    assert main(["train", "x.parquet", "--evaluate"]) == 1
    said = capsys.readouterr().err
    assert "not installed: no-such-package" in said
    assert "pip install no-such-package" in said


def test_a_handful_of_runs_is_not_learned_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = [config(f"mlp-{place}", batch=place + 2) for place in range(3)]
    files = (
        write_configs(tmp_path / "c.jsonl", *configs),
        write_rows(tmp_path / "r.jsonl", *map(row, ("mlp-0", "mlp-1"))),
    )
    pack(files[0], [files[1]], tmp_path, Lister(sys.executable, tmp_path / "l.jsonl", 1))
    data, models = str(tmp_path / "mlp.parquet"), tmp_path / "models"
    assert main(["train", data, "--out", str(models)]) == 2
    assert "mlp: 2 runs are too few to learn from" in capsys.readouterr().err
    assert main(["train", data, "--out", str(models), "--families", "cnn,transformer"]) == 2
    said = capsys.readouterr().err
    assert f"there are no runs of cnn, transformer in {data}" in said
    assert "there are some of mlp" in said
    assert not models.exists()
