"""The Router's side of control operations."""
