"""`carma bench paper --quick`: one run of it, for its structure, for figures that make sense, and for what is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from carma.cli import main
from carma.errors import CarmaError, Refused, Usage
from carma.traces import find
from carma_lab.bench.paper import page, study, workloads
from carma_lab.bench.paper import paper_file as writing
from carma_lab.bench.paper.claims import Claim, claims
from carma_lab.bench.paper.plots import pictures
from carma_lab.bench.paper.variants import DEFAULT_CAP, PARTS, QUICK, Scope
from carma_lab.bench.results_file import command_of
from carma_lab.cli.bench import PAPER_PARTS
from carma_lab.reports.drawing import Picture, save


def nothing_drawn(_: Sequence[Picture], __: Path) -> list[Path]:
    return []


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    only = ("tables", "curves", "limits")
    short = replace(find("t1"), tasks=find("t1").tasks[:24])  # the limits of all 60 take ten seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "find", lambda _name: short)
        assert study.run(study.Options(out=folder, quick=True, only=only), nothing_drawn) == 0
    return folder


@pytest.fixture(scope="module")
def found(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "paper.json").read_text(encoding="utf-8"))
    return read


def test_the_parts_that_were_asked_for_are_there_each_with_how_it_came(found: dict[str, Any]) -> None:
    assert list(found["parts"]) == ["tables", "curves", "limits"]
    for part in found["parts"].values():
        assert {"command", "seed", "date", "cpu", "carma", "python", "code", "took_s"} <= part["about"].keys()


def test_sharing_is_faster_than_exclusive_gpus_and_no_faster_than_the_limit(found: dict[str, Any]) -> None:
    (row,) = found["parts"]["limits"]["rows"]
    assert 0.3 < row["arrivals"] <= row["bound"] < 1.0
    for name, one in row["policies"].items():
        assert row["bound"] <= one["makespan"] < 1.0, name
        assert row["completion_bound"] <= one["completion"] < 1.0, name
        assert 1.0 <= one["run"] < 3.0, name
        assert one["over_bound"] == pytest.approx(one["makespan"] / row["bound"], abs=1e-3)
        assert one["failed"] == 0


def test_goodput_stands_beside_the_limit_at_its_cap(out: Path, found: dict[str, Any]) -> None:
    (row,) = found["parts"]["limits"]["rows"]
    capped = row["capped"]
    assert capped["cap"] == DEFAULT_CAP
    assert row["bound"] < capped["bound"] <= row["policies"]["goodput"]["makespan"]
    assert 1.0 < capped["slowdown_max"] <= DEFAULT_CAP + 0.01
    assert capped["over_bound"] == pytest.approx(row["policies"]["goodput"]["makespan"] / capped["bound"], abs=1e-3)
    bounds = {point["cap"]: point["bound"] for point in found["parts"]["curves"]["traces"]["t1"]["curve"]}
    assert bounds[1.1] > bounds[DEFAULT_CAP] == capped["bound"]
    assert bounds[None] == row["bound"]
    text = (out / "README.md").read_text(encoding="utf-8")
    assert f"| **the limit at cap {DEFAULT_CAP:g}** | {capped['bound']:.3f} |" in text
    assert f"| goodput, times the limit at cap {DEFAULT_CAP:g} | {capped['over_bound']:.2f} |" in text


def at_the_cap(parts: dict[str, Any]) -> Claim | None:
    aim = f"of the limit at its cap, {DEFAULT_CAP:g}, on 4 GPUs"
    return next((one for one in claims(parts) if aim in one.aim), None)


def test_within_the_limit_at_the_cap_is_only_who_keeps_the_cap(found: dict[str, Any]) -> None:
    parts = json.loads(json.dumps(found["parts"]))
    capped = parts["limits"]["rows"][0]["capped"]

    def judged(over: float, slowdown: float) -> Claim:
        capped.update(over_bound=over, slowdown_max=slowdown)
        claim = at_the_cap(parts)
        assert claim is not None
        return claim

    assert judged(1.09, 1.25).met is True
    assert judged(1.11, 1.25).met is False
    broken = judged(0.98, 1.61)
    assert broken.met is False
    assert "not kept on t1 1.61" in broken.found
    assert "| 0.98 \\* |" in page.text({**found, "parts": parts})


def test_a_file_from_before_the_limit_at_a_cap_is_still_shown(found: dict[str, Any], tmp_path: Path) -> None:
    older = json.loads(json.dumps(found))
    for row in older["parts"]["limits"]["rows"]:
        del row["capped"]
    for point in older["parts"]["curves"]["traces"]["t1"]["curve"]:
        del point["bound"]
    (tmp_path / "paper.json").write_text(json.dumps(older))
    assert study.run(study.Options(out=tmp_path, redraw=True), nothing_drawn) == 0
    assert "at cap" not in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert at_the_cap(older["parts"]) is None
    pytest.importorskip("matplotlib")
    assert save(pictures({"curves": older["parts"]["curves"]}), tmp_path)


def test_a_variant_has_the_same_figures_wherever_it_stands(found: dict[str, Any]) -> None:
    parts = found["parts"]
    (row,) = parts["limits"]["rows"]
    table = {one["name"]: one["traces"]["t1"] for one in parts["tables"]["variants"]}
    for name, point in parts["curves"]["traces"]["t1"]["points"].items():
        assert point["makespan"] == table[name]["makespan"] == row["policies"][name]["makespan"]


def test_a_larger_cap_costs_run_time_and_gains_makespan(found: dict[str, Any]) -> None:
    first, *_, last = found["parts"]["curves"]["traces"]["t1"]["curve"]
    assert first["cap"] == 1.1
    assert last["cap"] is None
    assert first["run"] < last["run"]
    assert first["makespan"] > last["makespan"]


def test_claims_follow_the_figures(found: dict[str, Any]) -> None:
    parts = json.loads(json.dumps(found["parts"]))
    goodput = next(one for one in parts["tables"]["variants"] if one["name"] == "goodput")

    def met(value: float) -> bool | None:
        goodput["mean"]["makespan"] = value
        return next(one.met for one in claims(parts) if one.aim.startswith("goodput's makespan, geometric mean"))

    assert met(0.69) is True
    assert met(0.71) is False


def test_what_was_not_run_is_not_met(found: dict[str, Any]) -> None:
    verdicts = {one["part"]: one["met"] for one in found["claims"]}
    assert verdicts["seeds"] is verdicts["philly"] is verdicts["speed"] is None


def test_the_page_has_every_claim_and_every_variant(out: Path, found: dict[str, Any]) -> None:
    text = (out / "README.md").read_text(encoding="utf-8")
    assert text == page.text(found)
    for claim in found["claims"]:
        assert claim["found"] in text
    for one in found["parts"]["tables"]["variants"]:
        assert one["name"] in text


def test_parts_of_different_code_versions_are_distinguished(found: dict[str, Any]) -> None:
    mixed = json.loads(json.dumps(found))
    for part in mixed["parts"].values():
        part["about"] |= {"code": "one", "code_changed": False}
    assert "not of one version" not in page.text(mixed)
    mixed["parts"]["limits"]["about"]["code"] = "another"
    assert "not of one version" in page.text(mixed)


def test_a_part_that_is_made_again_leaves_the_others_as_they_are(found: dict[str, Any]) -> None:
    again = writing.merged(found, "tables", {"about": {}, **found["parts"]["tables"], "gpus": 99}, QUICK)
    assert again["parts"]["tables"]["gpus"] == 99
    assert again["parts"]["limits"] == found["parts"]["limits"]
    assert list(again["parts"]) == list(found["parts"])


def test_a_full_study_takes_nothing_over_from_a_quick_one(found: dict[str, Any]) -> None:
    again = writing.merged(found, "limits", found["parts"]["limits"], Scope())
    assert list(again["parts"]) == ["limits"]


def test_a_file_that_is_none_of_the_study_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "paper.json").write_text('{"mine": 1}')
    with pytest.raises(Usage, match="no file of this study"):
        study.run(study.Options(out=tmp_path, quick=True, only=("tables",)), nothing_drawn)
    assert (tmp_path / "paper.json").read_text() == '{"mine": 1}'


def test_a_quick_study_does_not_take_the_place_of_a_whole_one(tmp_path: Path, out: Path) -> None:
    whole = (out / "paper.json").read_text().replace('"quick": true', '"quick": false', 1)
    (tmp_path / "paper.json").write_text(whole)
    with pytest.raises(Usage, match="holds the whole study") as told:
        study.run(study.Options(out=tmp_path, quick=True, only=("tables",)), nothing_drawn)
    assert "--out" in told.value.hint
    assert (tmp_path / "paper.json").read_text() == whole


def test_an_impossible_request_is_refused_before_any_work_and_leaves_no_file(tmp_path: Path) -> None:
    new = tmp_path / "new"
    for wrong, said in (
        (study.Options(out=new, quick=True, philly=tmp_path / "none.csv"), "No such file"),
        (study.Options(out=new, only=("philly",)), "needs the public trace"),
        (study.Options(out=new, redraw=True), "no such file"),
    ):
        with pytest.raises(CarmaError, match=said):
            study.run(wrong, nothing_drawn)
        assert not new.exists()


def test_pictures_are_drawn_of_the_parts_that_there_are(found: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = save(pictures(found["parts"]), tmp_path)
    assert {path.name for path in written} == {
        f"paper-{name}.{kind}" for name in ("curves", "bars") for kind in ("png", "svg")
    }
    assert all(path.stat().st_size > 5000 for path in written)


def test_caps_that_come_to_the_same_are_drawn(found: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    parts = {"curves": json.loads(json.dumps(found["parts"]["curves"]))}
    curve = parts["curves"]["traces"]["t1"]["curve"]
    curve[-2] |= {"run": curve[-1]["run"], "makespan": curve[-1]["makespan"]}
    assert len(save(pictures(parts), tmp_path)) == 2


def test_what_is_there_is_shown_again_without_simulating(out: Path, tmp_path: Path) -> None:
    (tmp_path / "paper.json").write_bytes((out / "paper.json").read_bytes())
    assert study.run(study.Options(out=tmp_path, redraw=True), nothing_drawn) == 0
    assert (tmp_path / "README.md").read_bytes() == (out / "README.md").read_bytes()
    with pytest.raises(Usage, match="no such file"):
        study.run(study.Options(out=tmp_path / "empty", redraw=True), nothing_drawn)


def test_philly_s_part_wants_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "paper", "--only", "philly", "--out", str(tmp_path)]) == 2
    assert "--philly FILE" in capsys.readouterr().err


def test_the_command_in_the_file_has_no_path_of_the_machine() -> None:
    options = study.Options(out=Path("/there/out"), only=("seeds", "speed"), jobs=3, philly=Path("/there/philly.csv"))
    assert command_of("paper", options) == "carma bench paper --only seeds,speed --parallel 3 --philly philly.csv"


def test_fewer_seeds_and_windows_are_used_and_reported() -> None:
    options = study.Options(seeds=3, windows=2)
    found = study.scope_of(options)
    assert (found.seeds, found.windows, found.traces) == (3, 2, Scope().traces)
    assert command_of("paper", options) == "carma bench paper --seeds 3 --windows 2"
    assert study.scope_of(study.Options()) == Scope()


def test_without_philly_s_file_all_other_parts_are_run() -> None:
    assert study.wanted(study.Options()) == ("tables", "curves", "limits", "seeds", "speed")
    assert study.wanted(study.Options(philly=Path("x"))) == PARTS
    assert PAPER_PARTS == PARTS


def test_the_page_and_the_claims_in_results_are_those_of_the_file() -> None:
    folder = Path(__file__).parents[2] / "lab" / "results" / "simulation"
    kept = json.loads((folder / "paper.json").read_text(encoding="utf-8"))
    assert not kept["quick"]
    assert kept["claims"] == msgspec.to_builtins(claims(kept["parts"]))
    assert (folder / "README.md").read_text(encoding="utf-8") == page.text(kept)


@pytest.mark.parametrize(
    ("gone", "words", "said", "hint"),
    [
        ({"scipy", "matplotlib"}, ["--only", "tables,limits"], "matplotlib and scipy are not", "matplotlib scipy"),
        ({"scipy"}, [], "scipy is not installed", "pip install scipy"),
        ({"matplotlib"}, ["--only", "tables"], "matplotlib is not installed", "pip install matplotlib"),
        ({"matplotlib"}, ["--redraw"], "matplotlib is not installed", "pip install matplotlib"),
    ],
)
def test_a_missing_package_is_reported_before_any_work(
    gone: set[str],
    words: list[str],
    said: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(study, "find_spec", lambda name: None if name in gone else name)
    assert main(["bench", "paper", "--quick", "--out", str(tmp_path / "new"), *words]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert hint in told
    assert not (tmp_path / "new").exists()


def test_scipy_is_wanted_only_where_limits_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "find_spec", lambda name: None if name == "scipy" else name)
    study.check_packages(study.Options(only=("tables", "seeds", "speed")))
    for part in study.LIMITED:
        with pytest.raises(Refused, match="scipy"):
            study.check_packages(study.Options(only=(part,), philly=Path("philly.csv")))
