"""Score centering with the likeliest tokens that vLLM returns: their requests, transport, log-probs and proof."""
