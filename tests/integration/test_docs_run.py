"""What the README and the users' pages say to type is typed: on one stack of fakes under the documented names."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.engine.convert_gguf import convert
from tests import tiny_gguf
from tests.integration.processes import free_port
from tests.issuers import Signer, jwks
from tests.measured import make_vocabulary
from tests.unit.test_docs import ASSIGNMENT, BLOCK
from workbench.cli import main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "users").glob("*.md")))
FAST = {"ttft_ms": 1, "itl_ms": 0.5, "prefill_ms_per_token": 0.02}

# Not run here, each for a reason; test_docs.py has parsed them.
LEFT_OUT = {
    "make": "builds the environment that this test runs in",
    "workbench up": "starts the stack that is already there: the fixture does so, and test_stack.py with --sweep --ask",
    "workbench down": "ends the stack under the other commands: the fixture does so at the end",
    "workbench schedule": "would write into the crontab of whoever runs the tests; test_schedule_job.py calls them all",
    "workbench bench ab": "minutes by design; tests/gateway/test_bench_turns.py does it on fakes",
    "workbench bench compare": "as `workbench compare`",
    "workbench bench import": "needs another tool's file; tests/unit/test_imported.py has some",
    "workbench compare": "needs two results that were measured in turns; tests/unit/test_comparison.py has them",
    "workbench register smollm2-135m --source /models/tuned": "needs other weights; test_rollout.py registers some",
    "workbench canary start": "needs a candidate; test_rollout.py takes two all the way",
    "workbench canary pause": "needs a rollout; tests/unit/test_rollout_policy.py pauses one",
    "workbench canary resume": "needs a rollout; tests/unit/test_rollout_policy.py has one that was paused",
    "workbench canary rollback": "needs a rollout; test_rollout.py takes one back",
    "workbench canary approve": "needs a judged candidate; test_gate.py approves one",
    "workbench canary reject": "needs a judged candidate; test_gate.py",
    "workbench gate": "needs a candidate with its evidence; test_gate.py judges some",
    "workbench lineage smollm2-135m@2": "needs a second version; test_gate.py walks from a request to its version",
    "workbench mlflow init-auth": "needs an MLflow that asks who you are; test_mlflow_auth.py",
    "workbench sweep smollm2-135m@2": "needs a second version; that of the first is run",
    "workbench eval run smollm2-135m@2 --suite gate": "needs a second version; that of the first is run",
    "workbench eval compare": "needs two evaluations; tests/unit/test_eval_command.py",
    "workbench drift": "reads the probabilities of tokens, which fakes have not; tests/gateway/test_readings.py",
    "workbench faults make": "converts a whole model; tests/unit/test_faults.py takes a tiny one",
    "workbench lab": "runs until Ctrl-C and needs JupyterLab's half a minute",
    "workbench logs gateway-0 --follow": "runs until Ctrl-C",
    "workbench sweep smollm2-135m gemma3-270m --mode full": "minutes by design; the other sweeps are short",
    "workbench sweep smollm2-135m --mode full --budget-minutes 20": "minutes by design",
    "workbench sweep smollm2-135m gemma3-270m --parallel": "a second sweep of both models; test_sweep_commands.py",
    "workbench sweep smollm2-135m --budget-usd 0.05 --measure-all --no-resume": "measures all again",
    "workbench slo-search": "minutes by design; test_sweep_commands.py runs one",
    "workbench tune": "starts engines of its own, for minutes; test_tuning_run.py does it on fakes",
    "workbench report run 04_trace_replay -p num_requests 60 --static": "needs a browser",
    "workbench report run 01_benchmark_sweep -p model smollm2-135m": "a quarter of a minute; another model's is run",
}
# The same command, cheaper or on what a stack of fakes has.
IN_PLACE_OF = {
    "--rate 2 --seconds 30": "--rate 20 --seconds 1",
    "--probe --seconds 30": "--probe --seconds 3",
    "--concurrency 1 --concurrency 8 --max-age-hours 0": "--concurrency 8 --max-age-hours 0",
    "concurrencies=[1, 4]": "concurrencies=[4]",
    "register smollm2-135m": "register tiny",  # the served name's version is that of a fake's weights
    "/models/my-model": "{folder}/weights",
    "/tmp/reports": "{folder}/reports",
    "-p model gemma3-270m": "-p model gemma3-270m -p concurrencies 1",
    "--suite gate": "--suite smoke",
    "RUN_ID": "{run_id}",
    "40953a4d0629181e": "{sweep}",
    "--output sweep.html": "--output {folder}/sweep.html",
    "http://127.0.0.1:8000": "{gateway}",
}
# What others need comes first, what ends something comes last.
FIRST = ("workbench pool start", "workbench bench", "workbench sweep", "workbench cost-table build")
LAST = ("workbench pool stop",)


@dataclass(frozen=True)
class Documented:
    """A stack in a folder, and what to type there."""

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WORKBENCH_")}
        return inherited | {"WORKBENCH_CONFIG": str(self.folder / "workbench.yaml"), "PYTHONPATH": str(ROOT)}

    def adapted(self, text: str) -> str:
        data = self.folder / ".workbench"
        table = data / "cost-table.json"
        values = {
            "folder": str(self.folder),
            "sweep": next((path.parent.name for path in (data / "results").glob("*/sweep.json")), ""),
            "run_id": json.loads(table.read_text())["run_id"] if table.exists() else "",
            "gateway": json.loads((data / "run" / "stack.json").read_text())["urls"]["gateway"],
        }
        for written, run in IN_PLACE_OF.items():
            text = text.replace(written, run.format(**values))
        return text

    def workbench(self, words: list[str], **env: str) -> str:
        """Standard output of a command, run in this process: it has imported what commands need."""
        with self.place("workbench", *words, **env) as (said, told), pytest.raises(SystemExit) as ending:
            main()
        code = ending.value.code
        assert code == 0, f"exit code {code}\n{said.getvalue()[-3000:]}\n{told.getvalue()[-3000:]}"
        return said.getvalue()

    def python(self, text: str) -> str:
        """What a script prints."""
        with self.place("-c") as (said, _):
            exec(compile(text, "<example>", "exec"), {"__name__": "__main__"})
        return said.getvalue()

    @contextmanager
    def place(self, *argv: str, **env: str) -> Iterator[tuple[StringIO, StringIO]]:
        """Inside, this process is in the folder, and what it prints is kept."""
        said, told, wanted = StringIO(), StringIO(), self.env | env
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(said),
            redirect_stderr(told),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("default")  # as outside of tests
            for name in set(os.environ) - set(wanted):
                patch.delenv(name)
            for name, value in wanted.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", list(argv))
            patch.chdir(self.folder)
            yield said, told


def config_of(folder: Path) -> dict[str, Any]:
    """The default configuration of the repository over fakes; one model more, which nothing serves."""
    default = yaml.safe_load((ROOT / "workbench.yaml").read_text("utf-8"))
    models = {name: {**model, "source": str(folder / "weights")} for name, model in default["models"].items()}
    models["tiny"] = {"source": str(folder / "weights")}
    pools = [{**pool, "launcher": "fake", "engine": FAST} for pool in default["pools"]]
    for pool in pools:
        del pool["cores"]
    ports = {"gateway": {"port": free_port()}, "mlflow": {"port": free_port()}, "lab": {"port": free_port()}}
    return {"models": models, "pools": pools, **ports}


@pytest.fixture(scope="module")
def documented() -> Iterator[Documented]:
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        place = Documented(Path(name))
        weights = place.folder / "weights"
        weights.mkdir()
        convert(tiny_gguf.write_llama(place.folder / "tiny.gguf", tiny_gguf.hf_weights()), weights)
        make_vocabulary(weights)
        shutil.copytree(ROOT / "notebooks", place.folder / "notebooks")
        (place.folder / "keys.json").write_text(jwks(Signer().entry))
        (place.folder / "tenants.yaml").write_text(the_block("yaml", "tenants:"))
        (place.folder / "workbench.yaml").write_text(yaml.safe_dump(config_of(place.folder)))
        with (place.folder / "out").open("w") as out:
            command = [sys.executable, "-m", "workbench", "up", "--no-lab"]
            stack = subprocess.Popen(command, cwd=place.folder, env=place.env, stdout=out, stderr=out)
        try:
            wait_until_it_serves(stack, place.folder / "out")
            yield place
            place.workbench(["down"])
            assert stack.wait(15) == 0
        finally:
            if stack.poll() is None:
                stack.terminate()
                stack.wait(30)


def wait_until_it_serves(stack: subprocess.Popen[bytes], out: Path) -> None:
    deadline_s = time.monotonic() + 120.0
    while "Serving until" not in out.read_text():
        assert stack.poll() is None and time.monotonic() < deadline_s, out.read_text()
        time.sleep(0.1)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of each block, repeated ones left out."""
    found: dict[str, str] = {}
    for page in PAGES:
        for match in BLOCK.finditer(page.read_text("utf-8")):
            if match[1] == language:
                found.setdefault(match[2], str(page.relative_to(ROOT)))
    return [(page, text) for text, page in found.items()]


def the_block(language: str, start: str) -> str:
    """The one block that begins so."""
    [found] = [text for _, text in blocks(language) if text.startswith(start)]
    return found


def examples() -> list[Any]:
    """Console lines and blocks of Python that are run, in an order in which what they need is there."""
    found = {
        line.removeprefix("$ "): page
        for page, text in reversed(blocks("console"))
        for line in text.splitlines()
        if not any(line == f"$ {left}" or line.startswith(f"$ {left} ") for left in LEFT_OUT)
    }
    commands = [pytest.param(run_command, line, id=f"{page}: {line}") for line, page in found.items()]
    scripts = [
        pytest.param(run_python, text, id=f"{page}: Python {n}") for n, (page, text) in enumerate(blocks("python"))
    ]
    return sorted(commands + scripts, key=lambda example: _turn(str(example.values[1])))


def _turn(text: str) -> int:
    if text.startswith(LAST):
        return len(FIRST) + 1
    return next((turn for turn, start in enumerate(FIRST) if text.startswith(start)), len(FIRST))


def run_command(line: str, documented: Documented) -> None:
    words, env = shlex.split(line), {}
    while ASSIGNMENT.match(words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    assert words[0] == "workbench"
    output = documented.workbench(words[1:], **env)
    if "--json" in words:
        json.loads(output)


def run_python(text: str, documented: Documented) -> None:
    documented.python(text)


@pytest.mark.parametrize(("run", "example"), examples())
def test_a_documented_example_does_what_it_says(
    run: Callable[[str, Documented], None], example: str, documented: Documented
):
    run(documented.adapted(example), documented)


def test_a_key_from_the_command_line_opens_the_running_stack_until_it_is_revoked(documented: Documented):
    def workbench(*words: str) -> str:
        return documented.workbench(list(words)).strip()

    def status() -> int:
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
        try:
            with urllib.request.urlopen(request, timeout=10.0) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def seconds_until(wanted: int) -> float:
        begun_s = time.monotonic()
        while status() != wanted and time.monotonic() < begun_s + 10.0:
            time.sleep(0.1)
        return time.monotonic() - begun_s

    url = documented.adapted("http://127.0.0.1:8000/v1/models")
    workbench("tenants", "create", "door", "--model", "*")
    key = workbench("keys", "create", "door", "--label", "door")
    assert seconds_until(200) < 5.0
    workbench("keys", "revoke", "door")
    assert seconds_until(401) < 5.0
    assert key.rsplit("_", 1)[1] not in "".join(
        path.read_text(errors="replace") for path in (documented.folder / ".workbench" / "logs").iterdir()
    )


def test_what_is_left_out_or_run_otherwise_is_still_documented():
    everything = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert [words for words in (*LEFT_OUT, *IN_PLACE_OF) if words not in everything] == []
