"""Counterfactual replay, which runs the stages of training over recorded steps with another correction.

    python -m recipe.offpolicy.whatif DIR \\
        --spec 'correction=[tis_token,gsm]' --grid correction.masks.gsm.upper=1.001,1.01,1.05

A replay keeps the run's data unchanged. It shows what a correction keeps, how it weights tokens, and how far its
weights are from unbiased weights on these steps, but it cannot show how the policy would have changed.
"""
