"""Score centering with the likeliest tokens that vLLM returns: their request, transport, log-probs and proof."""
