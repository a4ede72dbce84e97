"""The worker's side of the facades of other libraries."""
