from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.vocabularies import write_tokenizer
from workbench.loadgen import (
    ChatFrame,
    Empirical,
    Fixed,
    Form,
    FrameNeed,
    Independent,
    LogNormal,
    Prompt,
    Synthetic,
    Uniform,
    Vocabulary,
    WorkloadError,
    ask_chat_frame,
    embedding_prompts,
    synthetic_prompts,
)
from workbench.loadgen.prompts import each_once
from workbench.loadgen.workloads import mixed


@pytest.fixture
def vocabulary(tmp_path):
    write_tokenizer(tmp_path, special="<bos> $A <eos>")
    return Vocabulary.load(tmp_path)


def test_prompts_have_exactly_the_asked_length_with_bos(vocabulary):
    for length in (2, 16, 100):
        prompts = list(islice(synthetic_prompts(vocabulary, num_prompt_tokens=length, num_output_tokens=5, seed=1), 20))
        assert {len(prompt.token_ids) for prompt in prompts} == {length}
        assert {(prompt.num_prompt_tokens, prompt.num_output_tokens) for prompt in prompts} == {(length, 5)}
        assert {prompt.token_ids[0] for prompt in prompts} == {1}
        assert all(1 not in prompt.token_ids[1:] and 2 not in prompt.token_ids for prompt in prompts)


def test_without_special_tokens_there_are_none(tmp_path):
    write_tokenizer(tmp_path)
    vocabulary = Vocabulary.load(tmp_path)
    assert (vocabulary.prefix, vocabulary.suffix) == ((), ())
    prompt = next(synthetic_prompts(vocabulary, num_prompt_tokens=7, num_output_tokens=1, seed=1))
    assert len(prompt.token_ids) == 7
    assert min(prompt.token_ids) > 2


def test_no_two_prompts_share_a_first_block(vocabulary):
    prompts = islice(synthetic_prompts(vocabulary, num_prompt_tokens=40, num_output_tokens=1, seed=3), 500)
    assert len({prompt.token_ids[:16] for prompt in prompts}) == 500


def test_embeddings_carry_the_special_tokens_at_both_ends(vocabulary):
    prompt = next(embedding_prompts(vocabulary, num_prompt_tokens=12, seed=1))
    assert (len(prompt.token_ids), prompt.token_ids[0], prompt.token_ids[-1]) == (12, 1, 2)
    assert prompt.num_output_tokens == 0


def test_chats_have_exactly_the_asked_length_as_text(vocabulary):
    chats = Synthetic(Independent(Fixed(30), Fixed(5)), form=Form.CHAT)
    prompts = chats.prompts(vocabulary, seed=1, frame=ChatFrame(first=10))
    contents = [prompt.messages[0]["content"] for prompt in islice(prompts, 20)]
    assert {vocabulary.count(content) for content in contents} == {20}
    assert len(set(contents)) == 20


def test_same_seed_same_prompts(vocabulary):
    first, again, other = (
        list(islice(synthetic_prompts(vocabulary, num_prompt_tokens=20, num_output_tokens=1, seed=seed), 5))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert not {prompt.token_ids for prompt in first} & {prompt.token_ids for prompt in other}


def test_when_no_distinct_prompt_is_left_it_says_so(vocabulary):
    with pytest.raises(WorkloadError, match="no distinct prompt of 1 words is left"):
        list(islice(synthetic_prompts(vocabulary, num_prompt_tokens=2, num_output_tokens=1, seed=1), 400))
    with pytest.raises(WorkloadError, match="no room"):
        next(synthetic_prompts(vocabulary, num_prompt_tokens=1, num_output_tokens=1, seed=1))


def test_a_missing_broken_or_poor_tokenizer_is_named(tmp_path):
    with pytest.raises(WorkloadError, match=r"tokenizer\.json is missing"):
        Vocabulary.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkloadError, match="cannot be read"):
        Vocabulary.load(tmp_path)
    write_tokenizer(tmp_path, num_words=50)
    with pytest.raises(WorkloadError, match="50 whole"):
        Vocabulary.load(tmp_path)


class Template:
    """Stands for a server's /tokenize: `around` tokens, more for each message, and more for texts of some lengths."""

    def __init__(self, vocabulary, *, around=5, each=4, whims=()):
        self.vocabulary, self.around, self.each, self.whims = vocabulary, around, each, iter(whims)
        self.bodies = []

    async def post_json(self, path, obj):
        assert path == "/tokenize"
        self.bodies.append(obj)
        texts = [message["content"] for message in obj["messages"]]
        own = sum(map(self.vocabulary.count, texts)) + len(texts) * self.each
        return {"count": own + self.around + next(self.whims, 0)}


async def test_the_chat_frame_is_asked_and_must_not_depend_on_the_text(vocabulary):
    assert await ask_chat_frame(Template(vocabulary), "m", vocabulary, FrameNeed()) == ChatFrame(9, 0)
    turns = FrameNeed(has_system=True, has_turns=True, extra={"tools": [1], "tool_choice": "none"})
    template = Template(vocabulary)
    assert await ask_chat_frame(template, "m", vocabulary, turns) == ChatFrame(13, 8)
    assert {tuple(body["tools"]) for body in template.bodies} == {(1,)}
    for whims in ([0, 1], [0, 0, 0, 3]):
        with pytest.raises(WorkloadError, match="depending on the text"):
            await ask_chat_frame(Template(vocabulary, whims=whims), "m", vocabulary, turns)


MODELS = sorted((Path(__file__).parents[2] / ".workbench" / "models").glob("*/tokenizer.json"))


@pytest.fixture(scope="module", params=[None, *MODELS], ids=lambda path: path.parent.name if path else "tiny")
def any_vocabulary(request, tmp_path_factory):
    """The tiny one, and those of the models that are on this machine."""
    if request.param is None:
        folder = tmp_path_factory.mktemp("weights")
        write_tokenizer(folder, special="<bos> $A <eos>")
        return Vocabulary.load(folder)
    return Vocabulary.load(request.param.parent)


def lengths(low, high):
    return st.integers(low, high).flatmap(lambda a: st.integers(a, high).map(lambda b: Uniform(a, b)))


FRAME = ChatFrame(first=7, each_turn=5)
conversations = st.builds(
    Synthetic,
    st.builds(Independent, lengths(20, 60), lengths(1, 20)),
    form=st.sampled_from(Form),
    num_prefix_tokens=st.sampled_from([0, 1, 40]),
    num_prefixes=st.integers(1, 3),
    num_turns=st.integers(1, 4),
    growth=st.one_of(st.none(), lengths(8, 30)),
    think_s=st.sampled_from([0.0, 1.5]),
)


def check_length(vocabulary, workload, prompt):
    """The prompt has exactly as many tokens as it says, by ids or by the model's tokenizer."""
    if workload.form is Form.IDS:
        assert prompt.num_prompt_tokens == len(prompt.token_ids)
        assert prompt.token_ids[: len(vocabulary.prefix)] == vocabulary.prefix
        return
    texts = [message["content"] for message in prompt.messages]
    assert prompt.num_prompt_tokens == sum(map(vocabulary.count, texts)) + FRAME.at_turn(prompt.turn)
    roles = [message["role"] for message in prompt.messages]
    assert roles[-1] == "user"
    assert (roles[0] == "system") == (workload.num_prefix_tokens > 0)


def begins_with(prompt, earlier):
    """Whether a prompt goes on where an earlier one ended."""
    for one, other in ((prompt.token_ids, earlier.token_ids), (prompt.messages, earlier.messages)):
        if one is not None and one[: len(other)] != other:
            return False
    return True


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workload=conversations, seed=st.integers(0, 2**32))
def test_conversations_are_exact_grow_and_share_only_their_prefix(any_vocabulary, workload, seed):
    prompts = list(islice(workload.prompts(any_vocabulary, seed=seed, frame=FRAME), 8))
    assert prompts == list(islice(workload.prompts(any_vocabulary, seed=seed, frame=FRAME), 8))
    before = None
    for prompt in prompts:
        check_length(any_vocabulary, workload, prompt)
        assert (prompt.session_id is None) == (workload.num_turns == 1)
        assert prompt.think_s == (workload.think_s if prompt.turn else 0.0)
        if prompt.turn:
            assert (prompt.session_id, prompt.turn) == (before.session_id, before.turn + 1)
            assert begins_with(prompt, before)
            asked = workload.growth or workload.shapes.prompt
            grown = prompt.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens
            assert asked.shortest <= grown <= asked.longest
        else:
            asked = workload.shapes.prompt
            assert asked.shortest <= prompt.num_prompt_tokens - workload.num_prefix_tokens <= asked.longest
        before = prompt
    assert len({repr(prompt.content) for prompt in prompts}) == len(prompts)


def test_a_prefix_is_shared_by_its_group_and_all_groups_occur(vocabulary):
    workload = Synthetic(Independent(Fixed(20), Fixed(1)), num_prefix_tokens=30, num_prefixes=3)
    prompts = list(islice(workload.prompts(vocabulary, seed=4), 60))
    assert {len(prompt.token_ids) for prompt in prompts} == {50}
    assert len({prompt.token_ids[1:31] for prompt in prompts}) == 3
    assert len({prompt.token_ids[31:] for prompt in prompts}) == 60


def test_tools_are_sent_in_openais_form(vocabulary):
    workload = Synthetic(Independent(Fixed(30), Fixed(4)), form=Form.CHAT, num_tools=10)
    prompt = next(workload.prompts(vocabulary, seed=1, frame=FRAME))
    names = [tool["function"]["name"] for tool in prompt.extra["tools"]]
    assert len(set(names)) == 10
    assert prompt.extra["tool_choice"] == "none"
    assert workload.frame_need == FrameNeed(extra=prompt.extra)
    with pytest.raises(WorkloadError, match="ask_chat_frame"):
        workload.prompts(vocabulary, seed=1)


def test_a_mix_keeps_its_shares_and_a_session_its_draw(vocabulary):
    workload = Synthetic(Independent(Fixed(20), Fixed(1)), num_turns=2)
    made = mixed(
        workload.prompts(vocabulary, seed=1),
        tiers={"priority": 0.25, "flex": 0.75},
        adapters={"base": 0.5, "french": 0.5},
        seed=1,
    )
    prompts = list(islice(made, 800))
    by_session = {}
    for prompt in prompts:
        by_session.setdefault(prompt.session_id, set()).add((prompt.tier, prompt.adapter))
    assert all(len(drawn) == 1 for drawn in by_session.values())
    assert 0.17 < sum(prompt.tier == "priority" for prompt in prompts) / 800 < 0.33
    assert {prompt.adapter for prompt in prompts} == {None, "french"}


def test_a_prompt_that_comes_again_is_found():
    twice = [Prompt(2, 1, token_ids=(1, 2)), Prompt(2, 1, token_ids=(1, 3)), Prompt(2, 1, token_ids=(1, 2))]
    with pytest.raises(WorkloadError, match="prompt 2 was there before"):
        list(each_once(iter(twice)))


@settings(max_examples=10, derandomize=True)
@given(st.floats(20, 500), st.floats(0.1, 1.5), st.integers(0, 99))
def test_lognormal_lengths_have_their_mean(mean, cv, seed):
    rng = random.Random(seed)
    drawn = [LogNormal(mean, cv).draw(rng) for _ in range(4000)]
    assert sum(drawn) / 4000 == pytest.approx(mean, rel=6 * cv / 4000**0.5 + 0.01)
    assert max(LogNormal(mean, cv, 600).draw(rng) for _ in range(300)) <= 600


def test_recorded_lengths_come_in_their_pairs():
    rng = random.Random(1)
    pairs = ((10, 1), (20, 2))
    assert {Empirical(pairs).draw(rng) for _ in range(50)} == set(pairs)
