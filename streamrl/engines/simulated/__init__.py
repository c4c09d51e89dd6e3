"""An engine without a model. It invents tokens at the pace of a real engine and holds the published weights."""
