"""The protocol of the caller's side: legal commands, and the handling of answers."""
