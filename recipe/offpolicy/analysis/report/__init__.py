"""One page about a recorded run, to send to a colleague: python -m recipe.offpolicy.report DIR."""
