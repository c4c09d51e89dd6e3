"""Commands that show runs or export them: the dashboard, its page as a file, the Chrome trace, the terminal view,
trackers."""
