"""What a notebook shows of our objects: small tables of HTML, in which every text is escaped. Pure."""
