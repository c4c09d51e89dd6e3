"""One trainer rank: ``trainer`` with its options, process group and metrics; ``updates`` takes its optimizer steps. Its
four folders are parts of it, no wings. Weights leave through a ``trainer.Publisher``. Imports torch."""
