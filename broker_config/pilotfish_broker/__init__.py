"""pilotfish's broker side: settings, Celery apps, Redis keys and scripts, frames and records.

Imported by clients and workers alike; it depends on neither, and never on torch.
"""
