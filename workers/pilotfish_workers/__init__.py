"""pilotfish's workers: the draft and the verify worker, their engines, models and algorithms."""
