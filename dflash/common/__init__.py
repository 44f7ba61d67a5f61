"""What every other package stands on: sharding, parameters, checkpoints, tokenizers, prompts."""
