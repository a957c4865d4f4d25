"""The verify worker: one Celery worker with one engine that runs the target model."""
