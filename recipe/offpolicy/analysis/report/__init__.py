"""HTML report about a recorded run: python -m recipe.offpolicy.report DIR."""
