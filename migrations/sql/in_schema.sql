-- Before each file, in its transaction.
SET LOCAL search_path = pgxlock_schema;
