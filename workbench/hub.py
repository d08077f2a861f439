"""The tokenizer of a model of the Hugging Face hub: vLLM's own loader left it in the hub's cache on this disk."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from serving.core.errors import Unavailable

TOKENIZER = "tokenizer.json"


def tokenizer_folder(source: str) -> Path:
    """The folder of a hub model's `tokenizer.json`: from the cache, where the engine left it, else fetched.

    Args:
        source: `hf:ORG/NAME[@REVISION]`.

    Raises:
        Unavailable: the model has none, or the hub does not answer and the cache lacks it.
    """
    name, _, revision = source.removeprefix("hf:").partition("@")
    try:
        cached = try_to_load_from_cache(name, TOKENIZER, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached).parent
        return Path(hf_hub_download(name, TOKENIZER, revision=revision or None)).parent
    except LocalEntryNotFoundError as error:
        raise _unavailable(source, f"the hub does not answer and the cache lacks its {TOKENIZER}") from error
    except EntryNotFoundError as error:
        raise _unavailable(source, f"its repository has no {TOKENIZER}") from error
    except (OSError, ValueError) as error:
        raise _unavailable(source, str(error)) from error


def _unavailable(source: str, why: str) -> Unavailable:
    return Unavailable(
        f"{source} cannot be measured: {why}, and prompts of exact lengths need the model's own tokenizer. Download "
        f"the repository to a folder, with a {TOKENIZER} in it, and give that folder as the model's source"
    )
