-- Where the file below works.
DO $pgxlock$
BEGIN
  PERFORM pg_catalog.set_config('search_path', /* literal */, false);
END $pgxlock$;
