"""The form of an API key."""

from __future__ import annotations

import hashlib

import pytest

from serving.store.api_keys import key_id_of, key_sha256, new_key, new_key_id


def test_a_new_key_names_its_id_and_is_like_no_other() -> None:
    key_id = new_key_id()
    key = new_key(key_id)
    assert key_id_of(key.encode()) == key_id
    assert key != new_key(key_id)
    assert len(key.rsplit("_", 1)[1]) == 48  # 192 bits
    assert key_sha256(key) == key_sha256(key.encode()) == hashlib.sha256(key.encode()).hexdigest()


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"wb_",
        b"wb__" + b"a" * 48,
        b"wb_abcd_short",
        b"wb_abcd_" + b"a" * 201,
        b"wb_ABCD_" + b"a" * 48,
        b"WB_abcd_" + b"a" * 48,
        b"wb_abcd_" + b"a" * 47 + b"\n",
        b"wb_abcd_" + b"a" * 40 + b"\xff",
        b"sk-abcd_" + b"a" * 48,
    ],
)
def test_what_has_another_form_has_no_id(key: bytes) -> None:
    assert key_id_of(key) is None
