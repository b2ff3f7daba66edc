"""``python -m kvbench.submit``: runs as rows of the leaderboard, the check of rows, and the table of all of them."""
