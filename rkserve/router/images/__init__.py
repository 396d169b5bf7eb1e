"""Images in requests: fetched, checked, decoded. The only room that decodes them."""
