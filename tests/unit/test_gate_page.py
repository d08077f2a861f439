"""The gate's page: the verdict first, the digest and how to approve it; nothing is loaded, nothing unescaped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core import gate_record
from serving.core.policies.gate import Gate, GateEvidence
from tests.gated import RIGHT, gathered
from workbench.gates.evaluated import Flip
from workbench.gates.gather import Gathered, template
from workbench.gates.page import page, write_page


@pytest.fixture(scope="module")
def passing() -> Gathered:
    return gathered()


@pytest.fixture(scope="module")
def failing() -> Gathered:
    return gathered(right=RIGHT | {"arithmetic": 0.3}, slower=1.3, action="full_gate")


def shown(found: Gathered) -> str:
    return page(found, found.record.as_bytes())


def test_a_pass_shows_the_digest_and_the_command_to_approve_it(passing: Gathered):
    digest = gate_record.digest(passing.record.as_bytes())
    text = shown(passing)
    assert "<header class='pass'>" in text
    assert f"workbench canary approve smollm2-135m@2 --digest {digest[:16]}" in text
    assert digest[16:] in text and text.index(digest[16:]) < text.index("<nav>")


def test_a_fail_offers_nothing_to_approve(failing: Gathered):
    text = shown(failing)
    assert "<header class='fail'>" in text
    assert "canary approve" not in text and "canary reject" in text
    assert "9 of 10 figures are worse" in text


def test_every_figure_has_its_interval_and_every_gate_its_place(passing: Gathered, failing: Gathered):
    text = shown(failing)
    for gate in Gate:
        assert f"id='{gate}'" in text and f"href='#{gate}'" in text
    assert re.search(r"30\.0 % worse \[\+2\d\.\d, \+3\d\.\d\]", text)
    assert "-0.0" not in shown(passing)


def test_what_is_missing_is_said(passing: Gathered):
    record = replace(passing.record, evidence={Gate.QUALITY: GateEvidence(doubts=("no noise floor",))})
    text = shown(replace(passing, record=record))
    assert "<header class='inconclusive'>" in text
    assert "No noise floor." in text and "No drift check of the candidate." in text


def test_flips_stand_side_by_side_and_differences_in_a_table(failing: Gathered):
    text = shown(failing)
    assert text.count("<article>") == 12 and "Flipped examples" in text
    assert "engine.flags.max_num_seqs</th><td>4</td><td>8</td>" in text
    assert "<span class='new'>+### " in text


def test_it_loads_nothing_and_runs_nothing(failing: Gathered):
    text = shown(failing)
    assert "<script" not in text and "http://" not in text and "https://" not in text
    assert "default-src 'none'" in text


def test_what_models_say_is_escaped(passing: Gathered):
    flip = Flip("gate", "format", "<img src=x>", "<b>", "<script>alert(1)</script>", "x" * 5000, is_lost=True)
    text = shown(replace(passing, flips=(flip,)))
    assert "<script>" not in text and "<img" not in text and "&lt;script&gt;" in text
    assert "x" * 1000 not in text


def test_the_page_is_written_whole(tmp_path: Path, passing: Gathered):
    write_page(passing, passing.record.as_bytes(), tmp_path / "a" / "report.html")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", "{{ a }}", "{{ a }}"),
        ("tokenizer_config.json", '{"chat_template": "{{ b }}"}', "{{ b }}"),
        ("tokenizer_config.json", "{}", None),
        ("config.json", "{}", None),
    ],
)
def test_the_template_is_found_where_models_keep_it(tmp_path: Path, name: str, content: str, expected: str | None):
    (tmp_path / name).write_text(content)
    assert template(tmp_path) == expected
