"""Settings of a model folder for reranking by a chat model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class RerankSettings(BaseModel):
    """Reranking by the probabilities of yes and no as the next token. The default texts are those
    that Qwen3-Reranker was trained with; they go through the model's own chat template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    system: str = Field(
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".',
        max_length=4096,
        description="What the system says.",
    )
    prompt: str = Field(
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        max_length=4096,
        pattern=r"(?s)\{query\}.*\{document\}|\{document\}.*\{query\}",
        description="What the user says, with `{query}` and `{document}`.",
    )
    instruction: str = Field(
        "Given a web search query, retrieve relevant passages that answer the query",
        max_length=4096,
        description="What stands for `{instruction}`: the task in a sentence.",
    )
    yes: str = Field("yes", min_length=1, max_length=64, description="The word for yes: one token.")
    no: str = Field("no", min_length=1, max_length=64, description="The word for no: one token.")
