"""Data sets through `datasets`, which takes seconds to import: local files and folders, no network."""

from __future__ import annotations

import json

import pytest

from workbench.loadgen import SpecError, parse_workload


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows = [{"question": f"why {n}", "size": 3 + n} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.csv").write_text("question,size\n" + "".join(f"{r['question']},{r['size']}\n" for r in rows))
    return tmp_path


def test_files_and_folders_become_prompts(folder):
    import datasets

    datasets.Dataset.from_dict({"question": [f"why {n}" for n in range(5)], "size": list(range(3, 8))}).save_to_disk(
        str(folder / "saved")
    )
    for name in ("rows.jsonl", "rows.csv", "saved"):
        workload = parse_workload(f"dataset:{folder / name},prompt=question,max_tokens=size,limit=4")
        prompts = list(workload.prompts(None, seed=1))
        assert [(prompt.text, prompt.num_output_tokens) for prompt in prompts] == [
            (f"why {n}", 3 + n) for n in range(4)
        ]
    with pytest.raises(SpecError, match="has no column quest; did you mean question"):
        parse_workload(f"dataset:{folder / 'rows.csv'},prompt=quest")
    with pytest.raises(SpecError, match=r"none of the columns messages, prompt, input; .* It has: question, size"):
        parse_workload(f"dataset:{folder / 'rows.csv'}")
    with pytest.raises(SpecError, match="cannot be loaded"):
        parse_workload(f"dataset:{folder / 'nowhere'},prompt=a")
    (folder / "rows.xml").write_text("<a/>")
    with pytest.raises(SpecError, match="file or a folder, not"):
        parse_workload(f"dataset:{folder / 'rows.xml'},prompt=a")
