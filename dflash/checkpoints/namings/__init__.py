"""Names of a target's weights in other frameworks, and the forms that they have there."""
