"""Calls that the gateway makes itself, for nobody's answer: a guard model's questions, mirrors for a candidate."""

from __future__ import annotations

from serving.gateway.accounting import Outcome
from serving.gateway.dispatch import Dispatcher
from serving.gateway.relay import Writer


async def run_own(dispatcher: Dispatcher, outcome: Outcome, writer: Writer) -> None:
    """Has a replica answer `outcome.call` to the writer; how far it came stands in the outcome. Raises ServingError."""
    assert outcome.call is not None
    dispatched = await dispatcher.dispatch(outcome.call, outcome.on_choice)
    try:
        outcome.answer = dispatched.answer
        assert dispatched.answer is not None  # dispatch() returns begun answers only
        await dispatched.answer.relay(writer, [])
    finally:
        dispatched.close()
