"""Score centering with the likeliest tokens that vLLM returns: requests, transport, log-probs and the proof."""
