-- Creates the schema named in the session, if one is and it does not exist. A
-- new schema is closed to PUBLIC. Not CREATE ... IF NOT EXISTS: that asks for
-- the right to create schemas even where there is nothing to create.
DO $$
DECLARE
  v_schema pg_catalog.text := pg_catalog.current_setting('pgxlock.schema');
BEGIN
  IF v_schema <> '' AND pg_catalog.to_regnamespace(pg_catalog.quote_ident(v_schema)) IS NULL THEN
    EXECUTE pg_catalog.format('CREATE SCHEMA %I', v_schema);
  END IF;
EXCEPTION WHEN duplicate_schema OR unique_violation THEN
  NULL;                                     -- another migrator was faster
END $$
