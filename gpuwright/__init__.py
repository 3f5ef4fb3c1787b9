"""Gpuwright: from a bare GPU server to an authenticated, audited LLM endpoint."""
