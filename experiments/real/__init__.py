"""A trained model on real text: where the data lie, the plan, its runs, and the tables that are folded from them."""
