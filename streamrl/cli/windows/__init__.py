"""Commands that show runs: the page, the same as a file, and the Chrome trace."""
