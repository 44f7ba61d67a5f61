"""What several drafting strategies are made of."""
