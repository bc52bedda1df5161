-- What the file below changes until the transaction ends, as it is now: that
-- transaction may be the tool's, which goes on after the file.
DO $pgxlock$
BEGIN
  PERFORM pg_catalog.set_config('pgxlock.search_path_before', pg_catalog.current_setting('search_path'), false),
          pg_catalog.set_config('pgxlock.lock_timeout_before', pg_catalog.current_setting('lock_timeout'), false),
          pg_catalog.set_config('pgxlock.client_min_messages_before', pg_catalog.current_setting('client_min_messages'), false),
          pg_catalog.set_config('pgxlock.quote_all_identifiers_before', pg_catalog.current_setting('quote_all_identifiers'), false);
END $pgxlock$;
