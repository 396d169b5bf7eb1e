"""The local catalogue of models: adding, listing and removing model folders."""
