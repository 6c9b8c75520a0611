"""Counterfactual replay: the stages of training, run with another correction over recorded steps.

    python -m recipe.offpolicy.whatif DIR \\
        --spec 'correction=[tis_token,gsm]' --grid correction.masks.gsm.upper=1.001,1.01,1.05

A replay holds the run's data fixed. It says what a correction keeps, weighs and how far that is from what would be
unbiased on these very steps; it cannot say what the policy would have become.
"""
