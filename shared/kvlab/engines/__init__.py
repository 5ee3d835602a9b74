"""Real engines behind one small protocol: see `kvlab.engines.protocol`."""
