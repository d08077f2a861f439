"""`python -m serving.gateway.guardrails.worker toxicity|presidio`: a check in a process of its own.

Says `{}` when its model is loaded, then reads `{"texts": […], …}` and answers `{"found": [[index, score, category,
spans], …]}`, on standard input and output, each with its length before it (4 bytes, big endian). Ends with its input.
A failure is `{"error": …}` by its kind alone: its message may quote a text.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import orjson

PIECE_CHARS = 100
"""A long text is scored piece by piece: a model of short comments does not see one sentence in a page.

An insult of 17 characters after 100 kind ones scores 1.00 in pieces of this length and 0.46 in pieces of 150 to 400.
"""
SPACY_MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")

Finds = list[list[Any]]
Check = Callable[[dict[str, Any]], Finds]


def toxicity() -> Check:
    """The model of alt-profanity-check: a linear one on words, trained on 200,000 comments in English."""
    model = importlib.import_module("profanity_check")

    def check(request: dict[str, Any]) -> Finds:
        pieces = [(index, piece) for index, text in enumerate(request["texts"]) for piece in pieces_of(text)]
        scores: dict[int, float] = {}
        if pieces:
            for (index, _), score in zip(pieces, model.predict_prob([piece for _, piece in pieces]), strict=True):
                scores[index] = max(scores.get(index, 0.0), float(score))
        return [[index, score, "toxicity", []] for index, score in scores.items()]

    return check


def pieces_of(text: str) -> Iterator[str]:
    """The text in pieces of about `PIECE_CHARS`, cut between words where it can be."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):
            cut = text.rfind(" ", start + PIECE_CHARS // 2, end)
            end = cut if cut > 0 else end
        if text[start:end].strip():
            yield text[start:end]
        start = end


def presidio() -> Check:
    """Presidio's recognizers; with a model of spaCy that is installed they also find names and places."""
    analyzer = _analyzer()

    def check(request: dict[str, Any]) -> Finds:
        found: Finds = []
        for index, text in enumerate(request["texts"]):
            results = analyzer.analyze(
                text=text,
                language="en",
                entities=request["entities"] or None,
            )
            found += [[index, float(r.score), str(r.entity_type).lower(), [[r.start, r.end]]] for r in results]
        return found

    return check


def _analyzer() -> Any:
    _stay_offline()
    presidio_analyzer = importlib.import_module("presidio_analyzer")
    nlp = importlib.import_module("presidio_analyzer.nlp_engine")
    name = next((model for model in SPACY_MODELS if importlib.util.find_spec(model)), None)
    engine = nlp.SpacyNlpEngine(models=[{"lang_code": "en", "model_name": name or "blank"}])
    if name is None:
        engine.nlp = {"en": importlib.import_module("spacy").blank("en")}
    return presidio_analyzer.AnalyzerEngine(nlp_engine=engine, supported_languages=["en"])


def _stay_offline() -> None:
    """Has the recognizer of mail addresses read the list of top-level domains that came with its package."""
    module: Any = importlib.import_module("tldextract.tldextract")
    module.TLD_EXTRACTOR = module.TLDExtract(suffix_list_urls=(), cache_dir=None)


CHECKS: dict[str, Callable[[], Check]] = {"toxicity": toxicity, "presidio": presidio}


def main(arguments: Sequence[str]) -> int:
    """Serves one check until its input ends."""
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # a library that prints must not break the protocol
    try:
        check = CHECKS[arguments[0]]()
    except Exception as error:  # noqa: BLE001 - whatever a library raises, the parent is told
        _write(stdout, {"error": type(error).__name__})
        return 1
    _write(stdout, {})
    while (request := _read(stdin)) is not None:
        try:
            _write(stdout, {"found": check(request)})
        except Exception as error:  # noqa: BLE001 - whatever a model raises is that request's failure
            _write(stdout, {"error": type(error).__name__})
    return 0


def _write(stream: BinaryIO, answer: dict[str, Any]) -> None:
    data = orjson.dumps(answer)
    stream.write(len(data).to_bytes(4, "big") + data)
    stream.flush()


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(4)
    if len(head) < 4:
        return None
    request: dict[str, Any] = orjson.loads(stream.read(int.from_bytes(head, "big")))
    return request


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
