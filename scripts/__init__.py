"""Programs of the Makefile and of CI."""
