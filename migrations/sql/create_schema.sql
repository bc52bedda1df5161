-- Creates the schema if it does not exist. A new schema is closed to PUBLIC. Not CREATE
-- ... IF NOT EXISTS: that asks for the right to create schemas even where there is
-- nothing to create.
DO $$
DECLARE
  v_schema text := current_setting('pgxlock.schema');
BEGIN
  IF to_regnamespace(quote_ident(v_schema)) IS NULL THEN
    EXECUTE format('CREATE SCHEMA %I', v_schema);
  END IF;
EXCEPTION WHEN duplicate_schema OR unique_violation THEN
  NULL;                                     -- another migrator was faster
END $$
