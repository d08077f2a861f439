"""From what a replica costs a second to what its tokens cost: the price split of the cost table.

With P = usd a second of the replica:

    input   P / prefill-only rate        } both times one factor, so that the mixed cell's own
    output  P / decode rate              } requests sum to P x the cell's time
    cached  P x measured seconds a cached token (not scaled: it is a time that was measured as it is)

The decode rate is that of `concurrency` streams decoding side by side, so output gets cheaper with
concurrency. The factor is near 1 on a busy replica and above it when the replica idles between steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TOKENS_PER_PRICE = 1_000_000


class PricingError(ValueError):
    """A figure that a price needs is missing, zero, negative or not finite; the message names it."""


@dataclass(frozen=True, slots=True)
class MixedWindow:
    """Tokens that the mixed cell's good requests brought and got in `window_s`."""

    num_prompt_tokens: float
    num_output_tokens: float
    window_s: float


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Usd per million tokens; `cached_input` is None where no cached cell was measured."""

    input: float
    output: float
    cached_input: float | None = None


def positive(name: str, value: float | None) -> float:
    """`value`, when it is a figure that can divide.

    Raises:
        PricingError: it is missing, not finite, or not above zero.
    """
    if value is None or not math.isfinite(value) or value <= 0:
        raise PricingError(f"{name} is {value}: a price needs a positive figure")
    return value


def split_price(
    usd_per_s: float,
    mixed: MixedWindow,
    *,
    prefill_tokens_per_s: float | None,
    decode_tokens_per_s: float | None,
    cached_tokens_per_s: float | None = None,
) -> TokenPrices:
    """Prices of input, output and cached input tokens of one mixed cell.

    Args:
        usd_per_s: of the whole replica.
        mixed: what the cell did and how long it took.
        prefill_tokens_per_s: of the prefill-only cell, whole replica.
        decode_tokens_per_s: at the mixed cell's concurrency, whole replica.
        cached_tokens_per_s: of the cached cell, whole replica.

    Raises:
        PricingError: a figure can't carry a price.
    """
    usd_per_s = positive("usd_per_s", usd_per_s)
    usd_per_input = usd_per_s / positive("prefill_tokens_per_s", prefill_tokens_per_s)
    usd_per_output = usd_per_s / positive("decode_tokens_per_s", decode_tokens_per_s)
    usd_spent = usd_per_s * positive("window_s", mixed.window_s)
    usd_unscaled = mixed.num_prompt_tokens * usd_per_input + mixed.num_output_tokens * usd_per_output
    factor = usd_spent / positive("tokens of the mixed cell", usd_unscaled)
    cached = None
    if cached_tokens_per_s is not None:
        cached = usd_per_s / positive("cached_tokens_per_s", cached_tokens_per_s) * TOKENS_PER_PRICE
    return TokenPrices(
        input=usd_per_input * factor * TOKENS_PER_PRICE,
        output=usd_per_output * factor * TOKENS_PER_PRICE,
        cached_input=cached,
    )


def embed_price(usd_per_s: float, prompt_tokens_per_s: float | None) -> TokenPrices:
    """An embedding has input alone: P / its rate. Output costs nothing because there is none.

    Raises:
        PricingError: a figure can't carry a price.
    """
    rate = positive("prompt_tokens_per_s", prompt_tokens_per_s)
    return TokenPrices(input=positive("usd_per_s", usd_per_s) / rate * TOKENS_PER_PRICE, output=0.0)
