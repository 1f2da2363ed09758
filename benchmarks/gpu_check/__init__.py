"""Check the trainer and the engine on a GPU without network: ``make gpu-check``."""
