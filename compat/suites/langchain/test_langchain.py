"""langchain-tests' own suites with langchain-openai; what is skipped there is an exception."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from scene import CHAT, EMBED, KEY, V1, VISION

CONNECTION = {"base_url": V1, "api_key": KEY, "max_retries": 0, "timeout": 60}


class TestChat(ChatModelIntegrationTests):
    """The chat model, by chat completions."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        """LangChain's class for OpenAI."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """How its users make it."""
        return {"model": CHAT, "temperature": 0, "stream_usage": True, **CONNECTION}

    @property
    def supports_json_mode(self) -> bool:
        """`response_format` of type json_object."""
        return True

    @property
    def supports_model_override(self) -> bool:
        """Another model for a single call."""
        return True

    @property
    def model_override_value(self) -> str:
        """That other model."""
        return VISION


class TestResponses(TestChat):
    """The same by the Responses API."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """With the switch for it."""
        return {**super().chat_model_params, "use_responses_api": True}


class TestEmbeddings(EmbeddingsIntegrationTests):
    """Vectors."""

    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        """LangChain's class for OpenAI."""
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        """Texts go as texts, not as ids of OpenAI's tokenizer."""
        return {"model": EMBED, "check_embedding_ctx_length": False, **CONNECTION}
