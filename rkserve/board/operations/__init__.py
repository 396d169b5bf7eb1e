"""Operations on a board besides runs: sleep, weight swaps, embeddings, reports."""
