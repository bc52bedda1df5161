-- What was set before the file.
DO $pgxlock$
BEGIN
  PERFORM pg_catalog.set_config('search_path', pg_catalog.current_setting('pgxlock.search_path_before'), false),
          pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('pgxlock.lock_timeout_before'), false),
          pg_catalog.set_config('client_min_messages', pg_catalog.current_setting('pgxlock.client_min_messages_before'), false),
          pg_catalog.set_config('quote_all_identifiers', pg_catalog.current_setting('pgxlock.quote_all_identifiers_before'), false);
END $pgxlock$;
