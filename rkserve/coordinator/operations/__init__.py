"""Operations as the Coordinator runs them, one module each."""
