"""From a target and questions to a drafter: the stages, their plan, the model card."""
