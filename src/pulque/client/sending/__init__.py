"""The producer without I/O: messages, batches, dispatch, retries, receipts."""
