"""What runs under an engine's own Python: the standard library, and the engine."""
