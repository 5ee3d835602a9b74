"""Connectors of the course's own, which vLLM loads by `kv_connector_module_path`."""
