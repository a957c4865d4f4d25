"""The algorithm: pure functions from tokens (later laws and coins) to verdicts; no I/O."""
