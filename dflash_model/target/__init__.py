"""The target model's side: identity, prompts, tables, greedy references, hidden states and their fidelity."""
