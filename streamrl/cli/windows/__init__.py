"""Commands that show runs: the page, the same as a file, the Chrome trace, several systems side by side."""
