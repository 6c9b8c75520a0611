"""On-policy distillation: a teacher's log-probs supervise failed rollouts of prompts that are rarely solved."""
