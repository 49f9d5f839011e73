"""``/v1/models`` in Anthropic's form, with the anthropic package and in pages."""

from __future__ import annotations

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ModelInfo
from hypothesis import given
from hypothesis import strategies as st

from kvd.http.messages_api.models import Page, listed
from kvd.http.responses import Model, ModelExtension
from protocol.errors import InvalidRequest
from tests.http.live import Live

VERSION = {"anthropic-version": "2023-06-01"}


def test_the_package_lists_and_describes_models(live: Live):
    live.unload("on-demand")
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as ai:
        found = {model.id: model for model in ai.models.list(limit=2)}
        assert {"fast", "slow", "on-demand"} <= found.keys()
        one = ai.models.retrieve("fast")
        assert ModelInfo.model_validate(one.model_dump()) == one == found["fast"]
        assert one.max_input_tokens == one.max_tokens > 1000
        assert one.capabilities.structured_outputs.supported
        assert found["on-demand"].max_tokens is None
        with pytest.raises(anthropic.NotFoundError) as missing:
            ai.models.retrieve("nope")
        assert missing.value.body["type"] == "error"
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            ai.models.list(limit=1001)


async def test_the_async_package_lists_models(live: Live):
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="none") as ai:
        assert "fast" in [model.id async for model in ai.models.list(limit=1)]


def test_openais_form_has_context_and_abilities(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as ai:
        (fast,) = [model for model in ai.models.list() if model.id == "fast"]
        assert (fast.object, fast.owned_by) == ("model", "kvd")
        assert fast.context_length == fast.max_model_len > 1000
        assert fast.kvd["chat"]["tools"]
        assert ai.models.retrieve("fast").context_length == fast.context_length
    assert "models" in httpx.get(f"{live.url}/v1/models").json()
    assert "models" not in httpx.get(f"{live.url}/v1/models", headers=VERSION).json()


MODELS = [Model(name, 0, ModelExtension("unloaded")) for name in "abcdefg"]


@given(st.integers(1, 9), st.booleans())
def test_pages_together_have_each_model_once_and_in_order(limit, backwards):
    found: list[str] = []
    page = Page(limit, before_id=None if not backwards else "g")
    while True:
        one = listed(MODELS, page)
        names = [model["id"] for model in one["data"]]
        found = names + found if backwards else found + names
        if not one["has_more"]:
            break
        page = Page(
            limit,
            after_id=None if backwards else one["last_id"],
            before_id=one["first_id"] if backwards else None,
        )
    assert "".join(found) == ("abcdef" if backwards else "abcdefg")


@pytest.mark.parametrize("page", [Page(after_id="z"), Page(before_id="z")])
def test_a_page_beside_an_unknown_model_is_refused(page):
    with pytest.raises(InvalidRequest, match="no model 'z'"):
        listed(MODELS, page)
