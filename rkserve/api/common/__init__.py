"""Values and translations that several APIs share."""
