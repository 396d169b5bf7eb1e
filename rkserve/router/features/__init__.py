"""Features beside generation: embeddings, reranking, tokenization, caches."""
