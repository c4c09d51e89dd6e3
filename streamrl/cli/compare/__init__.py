"""``streamrl compare``: a recipe under several systems, side by side. The runs alternate between the
systems; their figures are printed and written as a page (``observe.dashboard``)."""
