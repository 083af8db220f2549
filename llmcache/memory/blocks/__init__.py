"""K/V and states of prompts in blocks of tokens, within a budget."""
