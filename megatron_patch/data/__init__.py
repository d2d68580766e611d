"""Text and chats on their way to the model: preparation (text -> token files), run-time datasets, batches, "
"sampling."""
