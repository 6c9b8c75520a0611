"""On-policy distillation: a teacher's log-probs supervise failed rollouts of rarely solved prompts."""
