"""Worker processes: messages, supervision, restarts, and the messages of errors."""
