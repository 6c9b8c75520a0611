"""Score centering with the likeliest tokens that vLLM returns: request, transport, log-probs of the policy, proof."""
