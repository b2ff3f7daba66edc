"""The papers' cells of time and memory: which are filled, and a worker that fills the others on a GPU."""
