"""Publishing from a trainer rank: versions, chunks, and the server from which engines fetch them."""
