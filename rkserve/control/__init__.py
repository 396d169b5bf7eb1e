"""The control plane's rules: pure state changes, rollout plans, canary verdicts, recovery."""
