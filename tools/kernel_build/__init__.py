"""What setup.py builds with: no package of the installed project, and nothing here imports torch."""
